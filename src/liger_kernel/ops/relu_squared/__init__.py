"""Squared ReLU: y = max(x, 0)^2, elementwise (So et al., "Primer", 2021, arXiv 2109.08668)."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import on_shards
from liger_kernel.core.tensors import rows_or_whole, shaped

EXPORTS = ["LigerReLUSquaredFunction", "relu_squared_forward", "relu_squared_backward"]


@register_fake("liger_kernel::relu_squared_forward")
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_fake("liger_kernel::relu_squared_backward")
def _(dy, x):
    return torch.empty_like(dy, memory_format=torch.contiguous_format)


def _rows(t):
    return rows_or_whole(t if t.dim() else t.reshape(1))


class LigerReLUSquaredFunction(torch.autograd.Function):
    """`apply(X)`; see :func:`liger_relu_squared`. Saves x alone; the gradient has memory of its own, so a second backward is right."""

    @classmethod
    def apply(cls, X):
        return on_shards(super().apply, (X,), whole=())  # out here, a DTensor gets a DTensor gradient

    @staticmethod
    def forward(ctx, X):
        x = _rows(X)
        ctx.save_for_backward(x)
        return shaped(_ops.relu_squared_forward(x), X.shape)

    @staticmethod
    @first_derivative_only("relu_squared")
    def backward(ctx, dY):
        (x,) = ctx.saved_tensors
        return shaped(_ops.relu_squared_backward(_rows(dY), x), dY.shape)


def liger_relu_squared(x):
    """max(x, 0)^2.

    Args:
        x: any shape and strides, fp32, bf16 or fp16.

    Returns:
        x's shape and dtype; fp32 inside, rounded once. The gradient is 2 max(x, 0) dy, exactly 0 where x <= 0. NaN stays NaN.

    Raises:
        RuntimeError (ValueError before torch 2.12): another dtype.
    """
    return LigerReLUSquaredFunction.apply(x)


class LigerReLUSquared(torch.nn.Module):
    """Squared ReLU as a module without parameters; see :func:`liger_relu_squared`."""

    def forward(self, x):
        return LigerReLUSquaredFunction.apply(x)


def relu_squared_forward(X):
    """max(X, 0)^2 without autograd."""
    return shaped(_ops.relu_squared_forward(_rows(X)), X.shape)


def relu_squared_backward(X, dY):
    """dX from X and the gradient of the result."""
    return shaped(_ops.relu_squared_backward(_rows(dY), _rows(X)), X.shape)
