"""The forward of patched MuseGlimmerForConditionalGeneration models, and their vision tower's rotation."""

from liger_kernel.ops.rope import liger_rotary_pos_emb
from liger_kernel.patch.causal_lm import patched_forward

lce_forward = patched_forward("muse_glimmer", "MuseGlimmerForConditionalGeneration")


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """q, k (batch, patches, heads, head_dim), cos, sin (batch, patches, head_dim) -> (q', k') in their own dtypes; fp32 inside."""
    return liger_rotary_pos_emb(q, k, cos, sin, None, 2)
