"""The forward of patched DeepseekV4ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("deepseek_v4", "DeepseekV4ForCausalLM")
