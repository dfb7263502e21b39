"""The forwards of patched MllamaForCausalLM and MllamaForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("mllama", "MllamaForCausalLM")
lce_forward_conditional_generation = patched_forward("mllama", "MllamaForConditionalGeneration")
