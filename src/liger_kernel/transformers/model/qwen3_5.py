"""The forwards of patched Qwen3_5ForCausalLM and Qwen3_5ForConditionalGeneration models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("qwen3_5", "Qwen3_5ForCausalLM")
lce_forward_for_multimodal = patched_forward("qwen3_5", "Qwen3_5ForConditionalGeneration")
