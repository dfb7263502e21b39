"""The forward of patched Qwen3VLMoeForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration")
