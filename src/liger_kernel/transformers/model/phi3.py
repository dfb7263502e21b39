"""The forward of patched Phi3ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("phi3", "Phi3ForCausalLM")
