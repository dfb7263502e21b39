"""The forward of patched Qwen3VLForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen3_vl", "Qwen3VLForConditionalGeneration")
