"""The forward of patched FalconH1ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("falcon_h1", "FalconH1ForCausalLM")
