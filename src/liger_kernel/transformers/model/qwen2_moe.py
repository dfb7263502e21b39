"""The forward of patched Qwen2MoeForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen2_moe", "Qwen2MoeForCausalLM")
