"""Sparsemax: the Euclidean projection onto the simplex (Martins and Astudillo, "From Softmax to Sparsemax", 2016, arXiv 1602.02068)."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import on_shards
from liger_kernel.core.tensors import rows_or_whole, shaped

EXPORTS = ["LigerSparsemaxFunction"]


@register_fake("liger_kernel::sparsemax_forward")
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_fake("liger_kernel::sparsemax_backward")
def _(dy, y):
    return torch.empty_like(dy, memory_format=torch.contiguous_format)


def _dim_last(t, dim):
    """`t` with `dim` and the last dimension exchanged; one number as a row."""
    if not t.dim():
        return t.reshape(1)
    return t if dim % t.dim() == t.dim() - 1 else t.transpose(dim, -1)


class LigerSparsemaxFunction(torch.autograd.Function):
    """`apply(x, dim)`; see :func:`liger_sparsemax`. Saves the result; the gradient has memory of its own."""

    @classmethod
    def apply(cls, x, dim=-1):
        return on_shards(super().apply, (x,), options=(dim,), whole=(dim,) if x.dim() else ())  # out here, DTensors stay DTensors

    @staticmethod
    def forward(ctx, x, dim):
        if not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
            raise IndexError(f"sparsemax: dim is {dim}, x has {x.dim()} dimensions; expected one of them")
        turned = _dim_last(x, dim)
        y = shaped(_ops.sparsemax_forward(rows_or_whole(turned)), turned.shape)
        y = _dim_last(y, dim) if x.dim() else y.reshape(())
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    @first_derivative_only("sparsemax")
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        turned = _dim_last(dy, ctx.dim)
        dx = shaped(_ops.sparsemax_backward(rows_or_whole(turned), rows_or_whole(_dim_last(y, ctx.dim))), turned.shape)
        return _dim_last(dx, ctx.dim) if dy.dim() else dx.reshape(()), None


def liger_sparsemax(input, dim=-1):
    """The point of the probability simplex that is nearest to `input`, along `dim`: max(input - tau, 0) with tau such that it sums
    to 1. Elements more than tau below the top get probability 0 exactly.

    Args:
        input: any shape and strides, fp32, bf16 or fp16.
        dim: the dimension to project along, of any length.

    Returns:
        input's shape and dtype, rounded once. The gradient is dy minus its mean over the support, and 0 outside. NaN or +inf makes its
        row NaN, as does a row of nothing but -inf; -inf beside finite elements gives 0.

    Raises:
        IndexError: no such dimension.
        RuntimeError (ValueError before torch 2.12): another dtype.
    """
    return LigerSparsemaxFunction.apply(input, dim)


class LigerSparsemax(torch.nn.Module):
    """Sparsemax along `dim` as a module without parameters; see :func:`liger_sparsemax`."""

    def __init__(self, dim=-1):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return LigerSparsemaxFunction.apply(x, self.dim)

    def extra_repr(self):
        return f"dim={self.dim}"
