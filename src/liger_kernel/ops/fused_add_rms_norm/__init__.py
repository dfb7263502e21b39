"""Residual addition and RMSNorm in one op: s = x + r, y = s / sqrt(mean(s^2) + eps) * (weight + offset), over the last
dimension (Zhang & Sennrich, 2019). Every decoder layer does this twice."""

import math

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import on_shards
from liger_kernel.core.tensors import as_rows, rows_or_whole, shaped, unit_stride

EXPORTS = ["LigerFusedAddRMSNormFunction", "fused_add_rms_norm_forward", "fused_add_rms_norm_backward"]

# casting_mode names where s's dtype is rounded to; its integer forms are the reference package's.
ROUNDING = {"llama": 0, "gemma": 1, "none": -1, 0: 0, 1: 1, -1: -1}


@register_fake("liger_kernel::fused_add_rms_norm_forward")
def _(x, residual, weight, eps, weight_offset, rounding):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, torch.empty_like(y), x.new_empty((math.prod(x.shape[:-1]),), dtype=torch.float32)


@register_fake("liger_kernel::fused_add_rms_norm_backward")
def _(dy, ds, s, weight, rstd, weight_offset, rounding, want_dx, want_dw):
    dx = s.new_empty(s.shape if want_dx else (0,))
    return dx, (s if weight is None else weight).new_empty((s.shape[-1] if want_dw else 0,))


def _rounding(casting_mode):
    assert casting_mode in ROUNDING, (
        f"fused_add_rms_norm: casting_mode is {casting_mode!r}, expected one of 'llama', 'gemma', 'none'"
    )
    return ROUNDING[casting_mode]


def _forward(X, R, W, eps, offset, rounding):
    """(Y and S shaped like X, rstd, weight)"""
    assert W is None or X.shape[-1] == W.shape[0], (
        f"fused_add_rms_norm: weight has {W.shape[0]} elements, x has {X.shape[-1]} columns; they must be equal"
    )
    if X.shape != R.shape:
        raise ValueError(f"fused_add_rms_norm: x is {tuple(X.shape)}, the residual {tuple(R.shape)}; expand one to the other's shape")
    if X.dtype != R.dtype:  # rare: the sum, rounded to x's dtype once, goes through the kernel with nothing to add
        wide = X + R
        X = wide if wide.dtype == X.dtype else wide.to(X.dtype)
        R = X.new_zeros(()).expand_as(X)
    weight = W if W is None else unit_stride(W)
    y, s, rstd = _ops.fused_add_rms_norm_forward(rows_or_whole(X), rows_or_whole(R), weight, eps, offset, rounding)
    return shaped(y, X.shape), shaped(s, X.shape), rstd, weight


class LigerFusedAddRMSNormFunction(torch.autograd.Function):
    """`apply(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False)` -> (Y, S); see :func:`fused_add_rms_norm`.

    `in_place` is accepted for compatibility: gradients always go to memory of their own.

    X and R get the same gradient, and it is the same tensor object, as torch's own addition returns its upstream gradient for
    both operands. Whoever accumulates gradients (autograd's buffers, a leaf's .grad) writes only into a tensor that nothing else
    refers to, and copies otherwise.
    """

    @classmethod
    def apply(cls, X, R, W, *options):
        return on_shards(super().apply, (X, R), (W,), options)  # out here, a DTensor gets a DTensor gradient

    @staticmethod
    def forward(ctx, X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        ctx.options = float(offset), _rounding(casting_mode)
        ctx.residual_dtype = R.dtype
        Y, S, rstd, weight = _forward(X, R, W, eps, *ctx.options)
        ctx.save_for_backward(S, weight, rstd)
        if not torch.compiler.is_compiling():  # the compiler makes zeros of a gradient that is not there, as autograd would
            ctx.set_materialize_grads(False)
        return Y, S

    @staticmethod
    @first_derivative_only("fused_add_rms_norm")
    def backward(ctx, dY, dS):
        S, weight, rstd = ctx.saved_tensors
        want_dx, want_dw = any(ctx.needs_input_grad[:2]), weight is not None and ctx.needs_input_grad[2]
        if dY is None:  # only s is used: its gradient passes through
            dX, dW = dS, None
        else:
            ds = None if dS is None else rows_or_whole(dS)
            dx, dw = _ops.fused_add_rms_norm_backward(rows_or_whole(dY), ds, S, weight, rstd, *ctx.options, want_dx, want_dw)
            dX, dW = dx if want_dx else None, dw if want_dw else None
        dR = dX if dX is None or dX.dtype == ctx.residual_dtype else dX.to(ctx.residual_dtype)
        return dX, dR, dW, None, None, None, None


def fused_add_rms_norm(X, R, W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=False):
    """s = X + R and its root-mean-square normalisation, in one pass over memory.

    Args:
        X: [..., H], fp32, bf16 or fp16, any strides.
        R: the residual stream, [..., H]. Another dtype than X's costs two more passes.
        W: [H], any of those dtypes, or None for no weight (the offset is then unused).
        eps: added to the mean square.
        offset: added to the weight in fp32; 1.0 for weights stored around zero (Gemma).
        casting_mode: "llama" rounds s * rstd to X's dtype, then multiplies; "gemma" multiplies in fp32 and rounds last (also
            OLMo-2, GPT-OSS); "none" rounds every step.
        in_place: changes nothing; gradients always go to memory of their own.
        DTensors X and R keep their placements, but for whole rows on every rank; of a DTensor W the full value is taken.

    Returns:
        (y, s), both [..., H] in X's dtype, DTensors if X or R is one. s is rounded before it is normalised, as eager code does.
        Statistics and products are fp32.

    Raises:
        AssertionError: W's length is not H, or the casting mode is unknown.
        ValueError: X and R have different shapes.
        RuntimeError (ValueError before torch 2.12): tensors on different devices, or of another dtype.
    """
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode, in_place)


def liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    """:func:`fused_add_rms_norm` under the name and defaults of `transformers.functional`."""
    return fused_add_rms_norm(X, R, W, eps, offset, casting_mode, in_place)


class LigerFusedAddRMSNorm(torch.nn.Module):
    """Residual addition and RMSNorm with a learned weight [hidden_size]; see :func:`fused_add_rms_norm` for the arithmetic.

    `forward(hidden_states, residual)` returns (normalised, new residual). It needs only the attributes weight,
    variance_epsilon, offset, casting_mode and in_place, so that it can be bound to another library's norm.
    """

    def __init__(self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False):
        super().__init__()
        assert init_fn in ("ones", "zeros"), f"fused_add_rms_norm: init_fn is {init_fn!r}, expected 'ones' or 'zeros'"
        _rounding(casting_mode)
        self.weight = torch.nn.Parameter(torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size))
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states, residual):
        return fused_add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place)

    def extra_repr(self):
        return f"weight_shape={tuple(self.weight.shape)}, eps={self.variance_epsilon}, offset={self.offset}, in_place={self.in_place}"


def fused_add_rms_norm_forward(X, R, W, eps, offset, casting_mode):
    """(Y, S as rows, rstd, block size, warps, casting mode as int) without autograd; block size and warps are opaque."""
    rounding = _rounding(casting_mode)
    Y, S, rstd, _ = _forward(X, R, W, eps, offset, rounding)
    return Y, as_rows(S), rstd, 0, 0, rounding


def fused_add_rms_norm_backward(dY, dS_out, S, W, RSTD, offset, casting_mode, BLOCK_SIZE=0, num_warps=0, in_place=False,
                                needs_dw=None):
    """(dX, dR, dW) from what :func:`fused_add_rms_norm_forward` returned: dX and dR are the same tensor, shaped like dY; dS_out may
    be None; dW is None without a weight or with needs_dw=False."""
    want_dw = W is not None and needs_dw is not False
    ds = None if dS_out is None else rows_or_whole(dS_out)
    dx, dw = _ops.fused_add_rms_norm_backward(
        rows_or_whole(dY), ds, as_rows(S), W if W is None else unit_stride(W), RSTD, offset, _rounding(casting_mode), True, want_dw)
    dX = dx.view(dY.shape)
    return dX, dX, dw if want_dw else None
