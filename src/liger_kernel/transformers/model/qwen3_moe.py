"""The forward of patched Qwen3MoeForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen3_moe", "Qwen3MoeForCausalLM")
