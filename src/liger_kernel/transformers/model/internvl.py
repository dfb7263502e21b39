"""The forward of patched InternVLForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("internvl", "InternVLForConditionalGeneration")
