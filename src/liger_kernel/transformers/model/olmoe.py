"""The forward of patched OlmoeForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("olmoe", "OlmoeForCausalLM")
