"""The forward of patched Qwen2_5_VLForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")
