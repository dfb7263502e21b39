"""The forward of patched Olmo2ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("olmo2", "Olmo2ForCausalLM")
