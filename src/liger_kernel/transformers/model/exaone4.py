"""The forward of patched Exaone4ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("exaone4", "Exaone4ForCausalLM")
