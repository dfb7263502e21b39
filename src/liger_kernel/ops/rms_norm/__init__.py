"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over the last dimension (Zhang & Sennrich, 2019)."""

import math

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import on_shards
from liger_kernel.core.tensors import as_rows, rows_or_whole, shaped, unit_stride

EXPORTS = ["LigerRMSNormFunction", "rms_norm_forward", "rms_norm_backward"]

# casting_mode names where x's dtype is rounded to; its integer forms are the reference package's.
ROUNDING = {"llama": 0, "gemma": 1, "none": -1, 0: 0, 1: 1, -1: -1}


@register_fake("liger_kernel::rms_norm_forward")
def _(x, weight, eps, weight_offset, rounding):
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((math.prod(x.shape[:-1]),), dtype=torch.float32)


@register_fake("liger_kernel::rms_norm_backward")
def _(dy, x, weight, rstd, weight_offset, rounding, want_dx, want_dw):
    return dy.new_empty(dy.shape if want_dx else (0,)), (x if weight is None else weight).new_empty((x.shape[-1] if want_dw else 0,))


def _rounding(casting_mode):
    assert casting_mode in ROUNDING, f"rms_norm: casting_mode is {casting_mode!r}, expected one of 'llama', 'gemma', 'none'"
    return ROUNDING[casting_mode]


def _check(x, weight):
    assert weight is None or x.shape[-1] == weight.shape[0], (
        f"rms_norm: weight has {weight.shape[0]} elements, x has {x.shape[-1]} columns; they must be equal"
    )


class LigerRMSNormFunction(torch.autograd.Function):
    """`apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None)`; see :func:`rms_norm`.

    `in_place` and `row_mode` are accepted for compatibility: gradients always go to memory of their own.
    """

    @classmethod
    def apply(cls, X, W, *options):
        return on_shards(super().apply, (X,), (W,), options)  # out here, a DTensor gets a DTensor gradient

    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        rounding = _rounding(casting_mode)
        _check(X, W)
        x = rows_or_whole(X)
        weight = W if W is None else unit_stride(W)
        y, rstd = _ops.rms_norm_forward(x, weight, eps, offset, rounding)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = (float(offset), rounding)
        return shaped(y, X.shape)

    @staticmethod
    @first_derivative_only("rms_norm")
    def backward(ctx, dY):
        x, weight, rstd = ctx.saved_tensors
        want_dx, want_dw = ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1]
        dx, dw = _ops.rms_norm_backward(rows_or_whole(dY), x, weight, rstd, *ctx.options, want_dx, want_dw)
        dX = shaped(dx, dY.shape) if want_dx else None
        return dX, dw if want_dw else None, None, None, None, None, None


def rms_norm(x, weight, eps=1e-6, *, weight_offset=0.0, casting_mode="llama"):
    """Root-mean-square normalisation.

    Args:
        x: [..., H], fp32, bf16 or fp16, any strides.
        weight: [H], any of those dtypes, or None for no weight (the offset is then unused). Of a DTensor the full value is
            taken.
        eps: added to the mean square.
        weight_offset: added to the weight in fp32; 1.0 for weights stored around zero (Gemma).
        casting_mode: "llama" rounds x * rstd to x's dtype, then multiplies; "gemma" multiplies in fp32 and rounds last (also
            OLMo-2, GPT-OSS); "none" rounds every step.

    Returns:
        [..., H] in x's dtype; of a DTensor x a DTensor that lies as x does, but for whole rows on every rank. Statistics and
        products are fp32.

    Raises:
        AssertionError: weight's length is not H, or the casting mode is unknown.
        RuntimeError (ValueError before torch 2.12): tensors on different devices, or of another dtype.
    """
    return LigerRMSNormFunction.apply(x, weight, eps, weight_offset, casting_mode)


class LigerRMSNorm(torch.nn.Module):
    """RMSNorm with a learned weight [hidden_size]; see :func:`rms_norm` for the arithmetic.

    `forward` needs only the attributes weight, variance_epsilon, offset, casting_mode, in_place and row_mode, so that it can
    be bound to another library's norm.
    """

    def __init__(self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=True, row_mode=None,
                 elementwise_affine=True):
        super().__init__()
        assert init_fn in ("ones", "zeros"), f"rms_norm: init_fn is {init_fn!r}, expected 'ones' or 'zeros'"
        _rounding(casting_mode)
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = torch.nn.Parameter(torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size))
        else:
            self.register_parameter("weight", None)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place, self.row_mode = (
            eps, offset, casting_mode, in_place, row_mode)

    def forward(self, hidden_states):
        return LigerRMSNormFunction.apply(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place, self.row_mode)

    def extra_repr(self):
        shape = None if self.weight is None else tuple(self.weight.shape)
        return (f"weight_shape={shape}, eps={self.variance_epsilon}, offset={self.offset}, in_place={self.in_place}, "
                f"row_mode={self.row_mode}")


def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode=None):
    """(Y, X as rows, rstd, block size, warps, casting mode as int) without autograd; block size and warps are opaque."""
    rounding = _rounding(casting_mode)
    _check(X, W)
    x = as_rows(X)
    y, rstd = _ops.rms_norm_forward(x, W, eps, offset, rounding)
    return y.view(X.shape), x, rstd, 0, 0, rounding


def rms_norm_backward(dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE=0, num_warps=0, in_place=False, row_mode=None):
    """(dX, dW) from what :func:`rms_norm_forward` returned; dW is None without a weight."""
    dx, dw = _ops.rms_norm_backward(as_rows(dY), as_rows(X), W, RSTD, offset, _rounding(casting_mode), True, W is not None)
    return dx.view(dY.shape), None if W is None else dw
