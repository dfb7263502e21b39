"""The forward of patched Glm4vForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("glm4v", "Glm4vForConditionalGeneration")
