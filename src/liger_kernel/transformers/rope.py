"""Rotary position embeddings."""

from liger_kernel.ops.rope import liger_rotary_pos_emb, liger_rotary_pos_emb_gpt_oss, liger_rotary_pos_emb_vision

__all__ = ["liger_rotary_pos_emb", "liger_rotary_pos_emb_gpt_oss", "liger_rotary_pos_emb_vision"]
