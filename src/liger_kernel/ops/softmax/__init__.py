"""Softmax over the last dimension, fp32 inside."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import on_shards
from liger_kernel.core.tensors import rows_or_whole, shaped

EXPORTS = ["LigerSoftmaxFunction"]


@register_fake("liger_kernel::softmax_forward")
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_fake("liger_kernel::softmax_backward")
def _(dy, y):
    return torch.empty_like(dy, memory_format=torch.contiguous_format)


def _rows(t):
    return rows_or_whole(t if t.dim() else t.reshape(1))


class LigerSoftmaxFunction(torch.autograd.Function):
    """`apply(input_)`; see :func:`liger_softmax`. Saves the result; the gradient has memory of its own."""

    @classmethod
    def apply(cls, input_):
        return on_shards(super().apply, (input_,), whole=(-1,) if input_.dim() else ())  # out here, DTensors stay DTensors

    @staticmethod
    def forward(ctx, input_):
        y = shaped(_ops.softmax_forward(_rows(input_)), input_.shape)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @first_derivative_only("softmax")
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return shaped(_ops.softmax_backward(_rows(dy), _rows(y)), dy.shape)


def liger_softmax(x):
    """exp(x) / sum exp(x) over the last dimension, shifted by its largest element.

    Args:
        x: [..., V], fp32, bf16 or fp16, any strides, rows of any length.

    Returns:
        x's shape and dtype; fp32 inside, rounded once. The gradient is y (dy - sum of dy y). As with torch, a row with NaN or +inf, or
        of nothing but -inf, is NaN throughout; -inf beside finite elements gives 0.

    Raises:
        RuntimeError (ValueError before torch 2.12): another dtype.
    """
    return LigerSoftmaxFunction.apply(x)


class LigerSoftmax(torch.nn.Module):
    """Softmax over the last dimension as a module without parameters; see :func:`liger_softmax`."""

    def forward(self, x):
        return LigerSoftmaxFunction.apply(x)
