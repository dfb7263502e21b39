"""The rotation of patched PixtralVisionModel models."""

from liger_kernel.ops.rope import liger_rotary_pos_emb


def liger_rotary_pos_emb_pixtral(q, k, cos, sin, unsqueeze_dim=1):
    """`liger_rotary_pos_emb` for q (1, heads, patches, head_dim) and cos (patches, head_dim), which Pixtral unsqueezes in front."""
    return liger_rotary_pos_emb(q, k, cos, sin, None, unsqueeze_dim or 1)
