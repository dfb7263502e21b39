"""The forward of patched GptOssForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("gpt_oss", "GptOssForCausalLM")
