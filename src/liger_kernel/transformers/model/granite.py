"""The forward of patched GraniteForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("granite", "GraniteForCausalLM")
