"""Shapes, inputs and error bounds of group_norm, for its tests and for `liger numerics`."""

import math

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.group_norm import liger_group_norm
from liger_kernel.ops.group_norm.ref import eager, reference

# (shape, groups): one element, tails of every width, one to three spatial dimensions, planes of one element, model sizes, groups too
# large for one warp.
SHAPES = [((1, 1, 1), 1), ((2, 3, 7), 3), ((2, 8, 5, 6), 1), ((2, 8, 5, 6), 4), ((2, 8, 3, 4, 5), 2), ((3, 6, 31), 2), ((3, 6, 32), 3),
          ((5, 12, 1), 4), ((2, 64, 16, 16), 32), ((4, 320, 8, 8), 32), ((1, 4, 100, 130), 2), ((300, 4, 2), 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]
EPS = 1e-6


def inputs(shape, device, dtype=torch.float32, parameter_dtype=None, scale=1.0, offset=0.0):
    """x, weight, bias, dy."""
    torch.manual_seed(0)
    x, dy = ((torch.randn(shape, device=device) * s + o).to(dtype) for s, o in ((scale, offset), (1.0, 0.0)))
    weight, bias = (torch.randn(shape[1], device=device).to(parameter_dtype or dtype) for _ in range(2))
    return x, weight, bias, dy


def ours(x, weight, bias, groups, eps=EPS):
    return liger_group_norm(x, weight, bias, x.shape[1], groups, eps)


def run(function, x, weight, bias, dy, groups, eps=EPS):
    """(y, dx, dw, db)."""
    x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
    y = function(x, weight, bias, groups, eps)
    y.backward(dy)
    return y, x.grad, weight.grad, bias.grad


def bounds(x, weight, bias, dy, groups, eps=EPS):
    """Absolute errors of (y, dx, dw, db) before their final rounding, from fp64 tensors.

    The mean carries up to 8 units of the mean size of x, which is rstd times that in hat; everything else some 16 units of its own
    size. Sums over batch and space add the square root of their length.
    """
    channels = (1, -1) + (1,) * (x.dim() - 2)

    def mean(t):
        rows = t.reshape(t.shape[0], groups, -1)
        return rows.mean(-1, keepdim=True).expand_as(rows).reshape(t.shape)

    def total(t):
        return t.transpose(0, 1).reshape(t.shape[1], -1).sum(-1)

    centred = x - mean(x)
    rstd = (mean(centred.square()) + eps).rsqrt()
    hat, w, least = (centred * rstd).abs(), weight.abs().view(channels), SMALLEST[torch.float32]
    e_hat = 16 * U32 * (hat + 1) + 8 * U32 * rstd * mean(x.abs())
    y = w * e_hat + 4 * U32 * (hat * w + bias.abs().view(channels))
    g = dy.abs() * w
    dx = rstd * (32 * U32 * (g + mean(g) + hat * mean(g * hat)) + e_hat * mean(g * hat) + hat * mean(g * e_hat))
    across = (16 + math.sqrt(x.numel() / max(x.shape[1], 1))) * U32
    return y + least, dx + least, total(dy.abs() * (e_hat + across * hat)) + least, across * total(dy.abs()) + least


def check(x, weight, bias, dy, groups, compare_eager=True, eps=EPS):
    """Results and gradients against the definition in fp64, and their error against PyTorch's own op."""
    results = run(ours, x, weight, bias, dy, groups, eps)
    wide = [t.double() for t in (x, weight, bias, dy)]
    truth = run(reference, *wide, groups, eps)
    eagerly = run(eager, x, weight, bias, dy, groups, eps) if compare_eager else (None,) * 4
    limits = bounds(*wide, groups, eps)
    for name, got, want, bound, plain in zip(("y", "dx", "dw", "db"), results, truth, limits, eagerly, strict=True):
        assert_accurate(got, want, bound, plain, name)
    return results
