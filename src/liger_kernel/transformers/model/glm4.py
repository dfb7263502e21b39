"""The forward of patched Glm4ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("glm4", "Glm4ForCausalLM")
