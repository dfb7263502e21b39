"""The forward of patched SmolLM3ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("smollm3", "SmolLM3ForCausalLM")
