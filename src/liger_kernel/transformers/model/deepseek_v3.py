"""The forward of patched DeepseekV3ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("deepseek_v3", "DeepseekV3ForCausalLM")
