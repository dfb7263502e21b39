"""The forwards of patched Gemma4ForCausalLM and Gemma4ForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

causal_forward = patched_forward("gemma4_text", "Gemma4ForCausalLM")
multimodal_forward = patched_forward("gemma4", "Gemma4ForConditionalGeneration")
