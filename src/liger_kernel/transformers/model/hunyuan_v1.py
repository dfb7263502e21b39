"""The forwards of patched HunYuanDenseV1ForCausalLM and HunYuanMoEV1ForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM")
lce_forward_moe = patched_forward("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM")
