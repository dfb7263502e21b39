"""The forwards of patched Gemma3ForCausalLM and Gemma3ForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

causal_forward = patched_forward("gemma3_text", "Gemma3ForCausalLM")
multimodal_forward = patched_forward("gemma3", "Gemma3ForConditionalGeneration")
