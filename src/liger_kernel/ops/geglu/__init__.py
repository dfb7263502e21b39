"""GELU-gated unit: c = gelu(a) b (Shazeer, "GLU Variants Improve Transformer", 2020), gelu in its tanh form or exact."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import as_rows, rows_or_whole, shaped
from liger_kernel.ops.swiglu import gradients, local_gradient, operands, shard

EXPORTS = ["LigerGELUMulFunction", "geglu_forward", "geglu_backward"]


@register_fake("liger_kernel::geglu_forward")
def _(a, b, exact):
    return torch.empty_like(a, memory_format=torch.contiguous_format)


@register_fake("liger_kernel::geglu_backward")
def _(dc, a, b, exact, want_da, want_db):
    return tuple(dc.new_empty(dc.shape if want else (0,)) for want in (want_da, want_db))


def _exact(approximate):
    if approximate not in ("tanh", "none"):
        raise ValueError(f"geglu: approximate is {approximate!r}, expected 'tanh' or 'none'")
    return approximate == "none"


class LigerGELUMulFunction(torch.autograd.Function):
    """`apply(a, b, approximate="tanh")`; see :func:`liger_geglu`.

    Saves a and b and computes the activation again in backward, into memory of its own: a second backward is right. DTensors
    keep their placements, as in LigerSiLUMulFunction.
    """

    @staticmethod
    def forward(ctx, a, b, approximate="tanh"):
        ctx.exact = _exact(approximate)
        a, b = operands("geglu", *shard(ctx, a, b))
        rows_a, rows_b = rows_or_whole(a), rows_or_whole(b)
        ctx.save_for_backward(rows_a, rows_b)
        c = shaped(_ops.geglu_forward(rows_a, rows_b, ctx.exact), a.shape)
        return c if ctx.layout is None else ctx.layout.wrap(c)

    @staticmethod
    @first_derivative_only("geglu")
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        shape, dc = local_gradient(ctx, dc, a.dtype)
        da, db = _ops.geglu_backward(dc, a, b, ctx.exact, *ctx.needs_input_grad[:2])
        return *gradients(ctx, shape, da, db), None


def liger_geglu(a, b, approximate="tanh"):
    """GELU-gated unit, c = gelu(a) b.

    Args:
        a: [..., H] gate, fp32, bf16 or fp16, any strides.
        b: [..., H] what is gated. Another dtype than a's is promoted as in eager PyTorch.
        approximate: "tanh", gelu(a) = a / 2 (1 + tanh(sqrt(2 / pi) (a + 0.044715 a^3))), or "none", a times the normal
            distribution function of a; the names of torch.nn.functional.gelu.

    Returns:
        [..., H] in that dtype. fp32 inside; gelu is rounded to the dtype before the product, as eager code does.

    Raises:
        ValueError: another approximation.
        RuntimeError: the shapes differ. RuntimeError (ValueError before torch 2.12): other devices or dtypes.
    """
    return LigerGELUMulFunction.apply(a, b, approximate)


def geglu_forward(a, b, approximate="tanh"):
    """(a as rows, b as rows, c) without autograd."""
    a, b = operands("geglu", a, b)
    rows_a, rows_b = as_rows(a), as_rows(b)
    return rows_a, rows_b, _ops.geglu_forward(rows_a, rows_b, _exact(approximate)).view(a.shape)


def geglu_backward(a, b, dc, approximate="tanh"):
    """(da, db), shaped like dc, from what :func:`geglu_forward` returned."""
    da, db = _ops.geglu_backward(as_rows(dc), as_rows(a), as_rows(b), _exact(approximate), True, True)
    return da.view(dc.shape), db.view(dc.shape)
