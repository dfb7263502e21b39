"""The forward of patched Qwen3ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen3", "Qwen3ForCausalLM")
