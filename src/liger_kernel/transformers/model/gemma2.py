"""The forward of patched Gemma2ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("gemma2", "Gemma2ForCausalLM")
