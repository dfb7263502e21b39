"""The forward of patched Glm4MoeForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("glm4_moe", "Glm4MoeForCausalLM")
