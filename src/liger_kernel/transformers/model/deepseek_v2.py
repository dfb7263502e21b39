"""The forward of patched DeepseekV2ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("deepseek_v2", "DeepseekV2ForCausalLM")
