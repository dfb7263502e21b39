"""The forward of patched Glm4vMoeForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("glm4v_moe", "Glm4vMoeForConditionalGeneration")
