"""LayerNorm: y = (x - mean) / sqrt(var + eps) * weight + bias, over the last dimension (Ba, Kiros & Hinton, 2016)."""

import math

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.backends import registry, third_party
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import on_shards
from liger_kernel.core.tensors import as_rows, rows_or_whole, shaped, unit_stride

EXPORTS = ["LigerLayerNormFunction", "layer_norm_forward", "layer_norm_backward"]


@register_fake("liger_kernel::layer_norm_forward")
def _(x, weight, bias, eps, weight_offset):
    rows = math.prod(x.shape[:-1])
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty((rows,), dtype=torch.float32), x.new_empty((rows,), dtype=torch.float32)


@register_fake("liger_kernel::layer_norm_backward")
def _(dy, x, weight, bias, mean, rstd, weight_offset, want_dx, want_dw, want_db):
    dx = dy.new_empty(dy.shape if want_dx else (0,))
    dw = weight.new_empty(weight.shape) if want_dw else mean.new_empty((0,))
    return dx, dw, bias.new_empty(bias.shape) if want_db else mean.new_empty((0,))


def _check(x, **columns):
    for name, t in columns.items():
        if t is not None and x.shape[-1] != t.shape[0]:
            raise ValueError(f"layer_norm: {name} has {t.shape[0]} elements, x has {x.shape[-1]} columns; they must be equal")


class LigerLayerNormFunction(torch.autograd.Function):
    """`apply(X, W, B, eps, weight_offset=0.0)`; see :func:`layer_norm`. W and B may be None."""

    @classmethod
    def apply(cls, X, W, B, *options):
        return on_shards(super().apply, (X,), (W, B), options)  # out here, a DTensor gets a DTensor gradient

    @staticmethod
    def forward(ctx, X, W, B, eps, weight_offset=0.0):
        _check(X, weight=W, bias=B)
        x = rows_or_whole(X)
        weight, bias = W if W is None else unit_stride(W), B if B is None else unit_stride(B)
        y, mean, rstd = _ops.layer_norm_forward(x, weight, bias, eps, weight_offset)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.weight_offset = float(weight_offset)
        return shaped(y, X.shape)

    @staticmethod
    @first_derivative_only("layer_norm")
    def backward(ctx, dY):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        want_dx, want_dw, want_db = ctx.needs_input_grad[:3]
        dx, dw, db = _ops.layer_norm_backward(
            rows_or_whole(dY), x, weight, bias, mean, rstd, ctx.weight_offset, want_dx, want_dw, want_db)
        return shaped(dx, dY.shape) if want_dx else None, dw if want_dw else None, db if want_db else None, None, None


def layer_norm(x, weight, bias=None, eps=1e-6, *, weight_offset=0.0):
    """Layer normalisation with biased variance.

    Args:
        x: [..., H], fp32, bf16 or fp16, any strides.
        weight: [H], any of those dtypes, or None for no weight (the offset is then unused).
        bias: [H], any of those dtypes, or None for no bias.
        eps: added to the variance.
        weight_offset: added to the weight in fp32; 1.0 for weights stored around zero (LayerNorm1P of Nemotron).

    Returns:
        [..., H] in x's dtype. Statistics and products are fp32 and rounded once; rows whose mean is large against their spread
        keep their accuracy. Gradients have the dtypes of their tensors; those of weight and bias are summed in fp32 in a fixed
        order.

    Raises:
        ValueError: the length of weight or bias is not H.
        RuntimeError (ValueError before torch 2.12): tensors on different devices, or of another dtype.
    """
    return LigerLayerNormFunction.apply(x, weight, bias, eps, weight_offset)


def liger_layer_norm(X, W, B, eps):
    """LayerNorm over the last dimension; see :func:`layer_norm`."""
    return LigerLayerNormFunction.apply(X, W, B, eps)


class LigerLayerNorm(torch.nn.Module):
    """LayerNorm with learned weight and bias [hidden_size]; see :func:`layer_norm` for the arithmetic.

    Takes the place of `torch.nn.LayerNorm(hidden_size, eps=...)` over one dimension. There is a bias in any case, as in the
    reference package: random normal values with `bias=True`, zeros otherwise. `forward` needs only the attributes weight, bias
    (both may be None) and variance_epsilon, so that it can be bound to another library's norm. `impl`, `mode` and `backend`
    choose an implementation as in :mod:`liger_kernel.functional`.

    Args:
        hidden_size: H, or a tuple of that one number.
        eps: added to the variance.
        bias: how the bias starts.
        init_fn: "ones" or "zeros", how the weight starts.
        elementwise_affine: False leaves weight and bias None.

    Raises:
        AssertionError: `init_fn` is neither.
        ValueError: `hidden_size` is a tuple of another length.
    """

    def __init__(self, hidden_size, eps=1e-6, bias=False, init_fn="ones", impl=None, mode=None, backend=None, *, elementwise_affine=True):
        super().__init__()
        assert init_fn in ("ones", "zeros"), f"layer_norm: init_fn is {init_fn!r}, expected 'ones' or 'zeros'"
        if isinstance(hidden_size, (tuple, list)):
            if len(hidden_size) != 1:
                raise ValueError(f"layer_norm: hidden_size is {tuple(hidden_size)}, expected one number; flatten those dimensions")
            (hidden_size,) = hidden_size
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.impl, self.mode = backend if impl is None else impl, mode
        if elementwise_affine:
            self.weight = torch.nn.Parameter(torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size))
            self.bias = torch.nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)

    @property
    def backend(self):
        """An older name of `impl`."""
        return self.impl

    @backend.setter
    def backend(self, name):
        self.impl = name

    def forward(self, hidden_states):
        impl, mode = getattr(self, "impl", None), getattr(self, "mode", None)
        if registry.choosing or impl is not None or mode is not None:
            other = third_party("layer_norm", hidden_states, impl, mode)
            if other is not None:
                return other(hidden_states, self.weight, self.bias, self.variance_epsilon)
        return LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self):
        return f"{self.hidden_size}, eps={self.variance_epsilon}, impl={self.impl}, mode={self.mode}"


def layer_norm_forward(X, W, B, eps):
    """(Y, X as rows, mean, rstd, block size, warps) without autograd; mean and rstd are fp32, block size and warps opaque."""
    _check(X, weight=W, bias=B)
    x = as_rows(X)
    y, mean, rstd = _ops.layer_norm_forward(x, W, B, eps, 0.0)
    return y.view(X.shape), x, mean, rstd, 0, 0


def layer_norm_backward(dY, X, W, B, Mean, RSTD, needs_dw=None, needs_db=None):
    """(dX, dW, dB) from what :func:`layer_norm_forward` returned; dW and dB are None when not needed (None: needed)."""
    want_dw = W is not None and needs_dw is not False
    want_db = B is not None and needs_db is not False
    dx, dw, db = _ops.layer_norm_backward(as_rows(dY), as_rows(X), W, B, Mean, RSTD, 0.0, True, want_dw, want_db)
    return dx.view(dY.shape), dw if want_dw else None, db if want_db else None
