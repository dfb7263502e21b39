"""The forwards of patched Qwen3_5MoeForCausalLM and Qwen3_5MoeForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen3_5_moe", "Qwen3_5MoeForCausalLM")
lce_forward_conditional_generation = patched_forward("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
