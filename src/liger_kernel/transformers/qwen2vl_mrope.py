"""Rotary position embeddings by sections of channels."""

from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction, liger_multimodal_rotary_pos_emb

__all__ = ["LigerQwen2VLMRopeFunction", "liger_multimodal_rotary_pos_emb"]
