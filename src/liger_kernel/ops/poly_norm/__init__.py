"""PolyNorm: y = w0 n(x^3) + w1 n(x^2) + w2 n(x) + b with n(u) = u / sqrt(mean(u^2) + eps) over the last dimension (Zhuo et al.,
"Polynomial Composition Activations", 2024, arXiv 2411.03884)."""

import math

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import on_shards
from liger_kernel.core.tensors import rows_or_whole, shaped, unit_stride

EXPORTS = ["LigerPolyNormFunction", "poly_norm_forward", "poly_norm_backward"]


@register_fake("liger_kernel::poly_norm_forward")
def _(x, weight, bias, eps):
    rows = math.prod(x.shape[:-1])  # .numel() would make it a constant of the graph
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((rows, 3), dtype=torch.float32)


@register_fake("liger_kernel::poly_norm_backward")
def _(dy, x, weight, bias, rstd, want_dx, want_dw, want_db):
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format) if want_dx else dy.new_empty((0,))
    return dx, weight.new_empty((3 if want_dw else 0,)), bias.new_empty((1 if want_db else 0,))


def _check(X, W, B):
    assert W.shape[0] == 3, f"poly_norm: weight has {W.shape[0]} elements, expected 3: of x^3, x^2 and x"
    assert B.numel() == 1, f"poly_norm: bias has {B.numel()} elements, expected 1"


class LigerPolyNormFunction(torch.autograd.Function):
    """`apply(X, W, B, eps=1e-6, in_place=True)`; see :func:`liger_poly_norm`."""

    @classmethod
    def apply(cls, X, W, B, *options):
        return on_shards(super().apply, (X,), (W, B), options)  # out here, a DTensor gets a DTensor gradient

    @staticmethod
    def forward(ctx, X, W, B, eps=1e-6, in_place=True):
        _check(X, W, B)
        x, weight = rows_or_whole(X), unit_stride(W)
        y, rstd = _ops.poly_norm_forward(x, weight, B, eps)
        ctx.save_for_backward(x, weight, B, rstd)
        return shaped(y, X.shape)

    @staticmethod
    @first_derivative_only("poly_norm")
    def backward(ctx, dY):
        x, weight, bias, rstd = ctx.saved_tensors
        want_dx, want_dw, want_db = ctx.needs_input_grad[:3]
        dx, dw, db = _ops.poly_norm_backward(rows_or_whole(dY), x, weight, bias, rstd, want_dx, want_dw, want_db)
        return shaped(dx, dY.shape) if want_dx else None, dw if want_dw else None, db.view(bias.shape) if want_db else None, None, None


def liger_poly_norm(X, W, B, eps=1e-6, in_place=True):
    """Weighted sum of a row's normalised powers.

    Args:
        X: [..., H], fp32, bf16 or fp16, any strides.
        W: [3], the weights of x^3, x^2 and x; any of those dtypes.
        B: one element, any of those dtypes.
        eps: added to the mean squares.
        in_place: accepted for compatibility: gradients always go to memory of their own.

    Returns:
        [..., H] in X's dtype; fp32 inside, rounded once. Gradients have the dtypes of X, W and B.

    Raises:
        AssertionError: W has not three elements, or B not one.
        RuntimeError (ValueError before torch 2.12): tensors on different devices, or of another dtype.
    """
    return LigerPolyNormFunction.apply(X, W, B, eps, in_place)


class LigerPolyNorm(torch.nn.Module):
    """PolyNorm with learned weights (3,), thirds at first, and a learned bias, 1 at first; see :func:`liger_poly_norm`."""

    def __init__(self, eps=1e-6, in_place=True):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = torch.nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states):
        return LigerPolyNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon, self.in_place)

    def extra_repr(self):
        return f"weight_shape={tuple(self.weight.shape)}, eps={self.variance_epsilon}, in_place={self.in_place}"


def poly_norm_forward(X, W, B, eps=1e-6):
    """(Y, X as rows, W, rstd [rows, 3], block size, warps) without autograd; block size and warps are opaque."""
    _check(X, W, B)
    x = rows_or_whole(X)
    y, rstd = _ops.poly_norm_forward(x, unit_stride(W), B, eps)
    return shaped(y, X.shape), x, W, rstd, 0, 0


def poly_norm_backward(dY, X, W, RSTD, BLOCK_SIZE=0, num_warps=0, in_place=False):
    """(dX, dW, dB [1] of W's dtype) from what :func:`poly_norm_forward` returned."""
    weight = unit_stride(W)
    dx, dw, db = _ops.poly_norm_backward(rows_or_whole(dY), rows_or_whole(X), weight, weight[:1], RSTD, True, True, True)
    return shaped(dx, dY.shape), dw, db
