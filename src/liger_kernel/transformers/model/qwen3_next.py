"""The forward of patched Qwen3NextForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen3_next", "Qwen3NextForCausalLM")
