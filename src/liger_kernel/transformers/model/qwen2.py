"""The forward of patched Qwen2ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen2", "Qwen2ForCausalLM")
