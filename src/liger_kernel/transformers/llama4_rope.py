"""Rotary position embeddings with complex tables."""

from liger_kernel.ops.llama4_rope import (
    LigerLlama4RopeFunction,
    apply_liger_llama4_rope_full,
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
)

__all__ = [
    "LigerLlama4RopeFunction", "apply_liger_llama4_rope_full", "liger_llama4_text_rotary_pos_emb", "liger_llama4_vision_rotary_pos_emb",
]
