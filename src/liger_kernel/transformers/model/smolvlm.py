"""The forward of patched SmolVLMForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("smolvlm", "SmolVLMForConditionalGeneration")
