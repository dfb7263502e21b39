"""Rotary position embeddings."""

import torch

from liger_kernel.ops.rope import (
    LigerRopeFunction,
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_deinterleave,
    liger_rotary_pos_emb_gpt_oss,
    liger_rotary_pos_emb_interleaved,
    liger_rotary_pos_emb_interleaved_table,
    liger_rotary_pos_emb_one,
    liger_rotary_pos_emb_vision,
)

__all__ = [
    "liger_rotary_pos_emb", "liger_rotary_pos_emb_complex", "liger_rotary_pos_emb_deinterleave", "liger_rotary_pos_emb_gpt_oss",
    "liger_rotary_pos_emb_interleaved", "liger_rotary_pos_emb_interleaved_table", "liger_rotary_pos_emb_one",
    "liger_rotary_pos_emb_vision",
]


def liger_rotary_pos_emb_complex(xq, xk, freqs_cis):
    """(xq', xk'); stands in for transformers' `apply_rotary_emb` of DeepSeek-V2: xq, xk (batch, heads, tokens, head_dim), channels
    (2i, 2i + 1) a complex number, times column i of freqs_cis (1 or batch, tokens, head_dim / 2), complex64."""
    table = torch.view_as_real(freqs_cis).flatten(-2)
    return LigerRopeFunction.apply(xq, xk, table, table, None, 1, xq.shape[-1], "pairs", "complex")
