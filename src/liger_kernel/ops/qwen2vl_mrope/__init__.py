"""Multimodal rotary position embedding of Qwen2-VL: channels take their angle from the temporal, height or width position by sections
(Wang et al., 2024, arXiv 2409.12191). The rotation is that of :mod:`liger_kernel.ops.rope`."""

import torch

from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.ops.rope import LigerRopeFunction, turn, turn_back

EXPORTS = ["LigerQwen2VLMRopeFunction"]


def _merge(name, t, sections):
    """(batch, tokens, width) from `t` (3, batch, tokens, width): in each half of the columns, section i of plane i."""
    if t.dim() != 4 or t.shape[0] != 3 or len(sections) != 3 or 2 * sum(sections) != t.shape[3]:
        raise ValueError(f"qwen2vl_mrope: {name} has the shape {tuple(t.shape)} and mrope_section is {sections}, expected "
                         "(3, batch, tokens, width) and three section widths that add up to width / 2")
    parts = t.split(sections * 2, dim=-1)
    return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)


class LigerQwen2VLMRopeFunction(LigerRopeFunction):
    """`apply(q, k, cos, sin, mrope_section, unsqueeze_dim=1)` -> (q', k'); see :func:`liger_multimodal_rotary_pos_emb`."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        sections = list(mrope_section)
        cos, sin = _merge("cos", cos, sections), _merge("sin", sin, sections)
        return turn(ctx, q, k, cos, sin, None, unsqueeze_dim)

    @staticmethod
    @first_derivative_only("qwen2vl_mrope")
    def backward(ctx, dq, dk):
        return *turn_back(ctx, dq, dk), None, None, None, None


def liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """Half rotation of q and k; stands in for `apply_multimodal_rotary_pos_emb` of older versions of transformers.

    Args:
        q: (batch, heads, tokens, head_dim), fp32, bf16 or fp16, any strides; (batch, tokens, heads, head_dim) if unsqueeze_dim is 2.
        k: like q but for the number of heads.
        cos, sin: (3, batch, tokens, head_dim) at the temporal, height and width positions.
        mrope_section: (t, h, w), t + h + w = head_dim / 2: of each half of a head the first t channels use cos[0], the next h
            cos[1], the others cos[2].
        unsqueeze_dim: the dimension of q that counts the heads.

    Returns:
        (q', k') in q's and k's dtypes, fp32 inside. cos and sin get no gradient.

    Raises:
        ValueError: shapes that do not fit.
        RuntimeError (ValueError before torch 2.12): other devices or dtypes.
    """
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb
