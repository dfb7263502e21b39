"""The forward of patched Olmo3ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("olmo3", "Olmo3ForCausalLM")
