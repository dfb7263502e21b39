"""GroupNorm: y = (x - mean) rstd weight + bias with the statistics of a group of channels over all of space (Wu & He, "Group
Normalization", 2018, arXiv 1803.08494)."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import gather_dtensor, unit_stride

EXPORTS = ["LigerGroupNormFunction", "group_norm_forward", "group_norm_backward"]


@register_fake("liger_kernel::group_norm_forward")
def _(x, weight, bias, groups, eps):
    statistics = [x.new_empty((x.shape[0], groups), dtype=torch.float32) for _ in range(2)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), *statistics


@register_fake("liger_kernel::group_norm_backward")
def _(dy, x, weight, bias, mean, rstd, groups, want_dx, want_dw, want_db):
    return tuple(t.new_empty(t.shape if wanted else (0,)) for t, wanted in ((x, want_dx), (weight, want_dw), (bias, want_db)))


def _check(X, num_channels, num_groups):
    assert X.dim() >= 3, f"group_norm: x has {X.dim()} dimensions, expected batch, channels and at least one more"
    assert X.shape[1] == num_channels, f"group_norm: x has {X.shape[1]} channels, num_channels is {num_channels}; they must be equal"
    assert num_groups > 0 and num_channels % num_groups == 0, (
        f"group_norm: {num_channels} channels do not divide into {num_groups} groups")


def _dense(t):
    return t if t.is_contiguous() else t.contiguous()


class LigerGroupNormFunction(torch.autograd.Function):
    """`apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps)`; see :func:`liger_group_norm`."""

    @classmethod
    def apply(cls, *arguments):
        return super().apply(*map(gather_dtensor, arguments))  # out here, a DTensor gets a DTensor gradient

    @staticmethod
    def forward(ctx, X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
        _check(X, num_channels, num_groups)
        x, weight, bias = _dense(X), unit_stride(affine_scaling_weight), unit_stride(affine_shifting_bias)
        y, mean, rstd = _ops.group_norm_forward(x, weight, bias, num_groups, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.groups = num_groups
        return y

    @staticmethod
    @first_derivative_only("group_norm")
    def backward(ctx, dY):
        wanted = ctx.needs_input_grad[:3]
        gradients = _ops.group_norm_backward(_dense(dY), *ctx.saved_tensors, ctx.groups, *wanted)
        return *(g if w else None for g, w in zip(gradients, wanted, strict=True)), None, None, None


def liger_group_norm(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
    """Group normalisation; equals `torch.nn.functional.group_norm`.

    Args:
        X: [batch, channels, ...] with at least one more dimension, fp32, bf16 or fp16; copied first unless it is contiguous.
        affine_scaling_weight, affine_shifting_bias: [channels], any of those dtypes.
        num_channels: X's channels.
        num_groups: divides the channels into groups of neighbours.
        eps: added to the variance.

    Returns:
        X's shape and dtype, contiguous. Statistics and arithmetic are fp32. Gradients are summed in fp32 and have the dtypes of their
        tensors.

    Raises:
        AssertionError: X has fewer than 3 dimensions or other channels, or the groups do not divide them.
        RuntimeError (ValueError before torch 2.12): lengths that do not fit, tensors on different devices, or of another dtype.
    """
    return LigerGroupNormFunction.apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps)


class LigerGroupNorm(torch.nn.Module):
    """GroupNorm with learned weight and bias (num_channels,); see :func:`liger_group_norm`.

    The bias is always a parameter: normally distributed at first if `bias`, else zeros.
    """

    def __init__(self, num_channels, num_groups, eps=1e-6, bias=False, init_fn="ones"):
        super().__init__()
        assert init_fn in ("ones", "zeros"), f"group_norm: init_fn is {init_fn!r}, expected 'ones' or 'zeros'"
        assert num_groups > 0 and num_channels % num_groups == 0, (
            f"group_norm: {num_channels} channels do not divide into {num_groups} groups")
        self.num_channels, self.num_groups = num_channels, num_groups
        self.eps = self.variance_epsilon = eps
        self.weight = torch.nn.Parameter(torch.ones(num_channels) if init_fn == "ones" else torch.zeros(num_channels))
        self.bias = torch.nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states):
        return LigerGroupNormFunction.apply(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon)

    def extra_repr(self):
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"


def group_norm_forward(X, num_channels, num_groups, W, B, eps):
    """(Y, X, mean, rstd) without autograd; mean and rstd are [batch, groups] fp32."""
    _check(X, num_channels, num_groups)
    x = _dense(X)
    y, mean, rstd = _ops.group_norm_forward(x, unit_stride(W), unit_stride(B), num_groups, eps)
    return y, x, mean, rstd


def group_norm_backward(dY, X, W, B, mean, rstd, num_channels, num_groups):
    """(dX, dW, dB) from what :func:`group_norm_forward` returned."""
    _check(X, num_channels, num_groups)
    return _ops.group_norm_backward(_dense(dY), _dense(X), unit_stride(W), unit_stride(B), mean, rstd, num_groups, True, True, True)
