"""Rotary position embedding as Llama-4 writes it: channels (2i, 2i + 1) of q and k are a complex number, times that of their token.
The kernels are those of :mod:`liger_kernel.ops.rope`, which read the complex table where it is."""

import torch

from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.ops.rope import LigerRopeFunction, turn, turn_back

EXPORTS = ["LigerLlama4RopeFunction"]


def _table(freqs_cis, batch, tokens, pairs):
    """`freqs_cis` as rope's table "complex": (tokens or more, 2 pairs) or (1 or batch, tokens, 2 pairs), fp32; a view of complex64."""
    shape = tuple(freqs_cis.shape)
    if freqs_cis.is_complex():
        freqs_cis = torch.view_as_real(freqs_cis.resolve_conj())
    rows = freqs_cis.shape[:-2]
    fits = freqs_cis.dim() in (3, 4) and tuple(freqs_cis.shape[-2:]) == (pairs, 2) and rows[-1] >= tokens
    if not fits or (len(rows) == 2 and rows[0] not in (1, batch)):
        raise ValueError(
            f"llama4_rope: freqs_cis has the shape {shape}, expected complex numbers (tokens or more, head_dim / 2) or (1 or batch, "
            f"tokens or more, head_dim / 2), or their real view (..., 2); batch is {batch}, tokens {tokens}, head_dim / 2 {pairs}")
    table = freqs_cis.flatten(-2)[..., :tokens, :]
    return table.float() if table.dtype == torch.float64 else table


class LigerLlama4RopeFunction(LigerRopeFunction):
    """`apply(q, k, freqs_cis, BLOCK_SIZE=None)` -> (q', k').

    Args:
        q: (batch, tokens, heads, head_dim), fp32, bf16 or fp16, any strides.
        k: like q but for the number of heads; brought to q's dtype.
        freqs_cis: (tokens or more, head_dim / 2) or (1 or batch, tokens or more, head_dim / 2) complex, or its real view
            (..., head_dim / 2, 2); the first `tokens` rows count. It gets no gradient.
        BLOCK_SIZE: ignored.

    Returns:
        q' and k' in q's dtype, in memory of their own; arithmetic is fp32. The gradients are multiplied by the conjugates.

    Raises:
        ValueError: shapes that do not fit.
        RuntimeError (ValueError before torch 2.12): other devices or dtypes.
    """

    @staticmethod
    def forward(ctx, q, k, freqs_cis, BLOCK_SIZE=None):
        if q.dim() != 4:
            raise ValueError(f"llama4_rope: q has the shape {tuple(q.shape)}, expected (batch, tokens, heads, head_dim)")
        ctx.k_dtype = k.dtype
        if k.dtype != q.dtype:
            k = k.to(q.dtype)
        table = _table(freqs_cis, q.shape[0], q.shape[1], q.shape[3] // 2)
        return turn(ctx, q, k, table, table, None, 2, q.shape[3], "pairs", "complex")

    @staticmethod
    @first_derivative_only("llama4_rope")
    def backward(ctx, dq, dk):
        dq, dk = turn_back(ctx, dq, dk)
        if dk is not None and dk.dtype != ctx.k_dtype:
            dk = dk.to(ctx.k_dtype)
        return dq, dk, None, None


def liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis):
    """(xq', xk'); stands in for transformers' `apply_rotary_emb` of Llama-4. See :class:`LigerLlama4RopeFunction`."""
    return LigerLlama4RopeFunction.apply(xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci):
    """(query', key'); stands in for transformers' `vision_apply_rotary_emb` of Llama-4.

    Args:
        query, key: (batch, tokens, heads, head_dim).
        freqs_ci: (tokens, head_dim / 2), (1 or batch, tokens, head_dim / 2), (tokens, 1, head_dim / 2) or
            (1 or batch, tokens, 1, head_dim / 2), complex. Real numbers (a complex buffer that a cast to another dtype has robbed of its
            imaginary part) scale both channels of a pair, as they do in transformers. On another device it is copied to query's.

    Raises:
        ValueError: another number of dimensions, or shapes that do not fit.
    """
    if freqs_ci.dim() not in (2, 3, 4):
        raise ValueError(f"llama4_rope: freqs_ci has {freqs_ci.dim()} dimensions, expected 2, 3 or 4")
    freqs_ci = freqs_ci.to(query.device)
    if freqs_ci.dim() == 4 and freqs_ci.shape[2] == 1:
        freqs_ci = freqs_ci.squeeze(2)
    elif freqs_ci.dim() == 3 and freqs_ci.shape[1] == 1 and freqs_ci.shape[0] == query.shape[1]:
        freqs_ci = freqs_ci.squeeze(1)
    if not freqs_ci.is_complex():
        freqs_ci = torch.complex(freqs_ci.float(), torch.zeros_like(freqs_ci, dtype=torch.float32))
    return LigerLlama4RopeFunction.apply(query, key, freqs_ci)


def apply_liger_llama4_rope_full(modeling_module):
    """Sets `apply_rotary_emb` and `vision_apply_rotary_emb` of `modeling_module` to the functions here."""
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb
