"""The forward of patched MinistralForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("ministral", "MinistralForCausalLM")
