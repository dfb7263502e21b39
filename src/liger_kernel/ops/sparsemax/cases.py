"""Shapes, inputs and error bounds of sparsemax, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.sparsemax import liger_sparsemax
from liger_kernel.ops.sparsemax.ref import eager, reference

# (rows, V): one element, tails of every width, powers of two and their neighbours, rows beyond 65536 columns (C26).
SHAPES = [(1, 1), (3, 7), (5, 31), (4, 32), (2, 33), (33, 127), (7, 1000), (6, 1024), (3, 1025), (5, 4096), (3, 4104), (2, 33001),
          (2, 65537), (2, 131072)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]


def inputs(shape, device, dtype=torch.float32, scale=1.0):
    """x, dy."""
    torch.manual_seed(0)
    return tuple((torch.randn(shape, device=device) * s).to(dtype) for s in (scale, 1.0))


def run(function, x, dy, dim=-1):
    """(y, dx)."""
    x = x.detach().requires_grad_()
    y = function(x, dim)
    y.backward(dy)
    return y, x.grad


def forward_bound(x, dim=-1):
    """Absolute error of y before its rounding. z = x - max is rounded where the two are far apart (elements of the support have |z| <= 1:
    at most one unit of 1); tau is their mean less 1 / size, whose sum of n terms has sqrt(n) units of the terms' mean."""
    return (8 + x.shape[dim] ** 0.5) * U32


def check(x, dy, dim=-1, compare_eager=True):
    """Result against the definition in fp64 and its error against eager code's; the gradient against the formula at the y that was
    saved."""
    y, dx = run(liger_sparsemax, x, dy, dim)
    assert y.dtype == dx.dtype == x.dtype
    plain = eager(x, dim) if compare_eager else None
    assert_accurate(y, reference(x.double(), dim), forward_bound(x, dim), plain, "y")
    support = y.detach() > 0
    size = support.sum(dim, keepdim=True)
    wide = dy.double()
    mean = (wide * support).sum(dim, keepdim=True) / size
    allowed = 4 * U32 * wide.abs() + (8 + x.shape[dim] ** 0.5) * U32 * (wide.abs() * support).sum(dim, keepdim=True) / size
    assert_accurate(dx, torch.where(support, wide - mean, torch.zeros_like(wide)), allowed, None, "dx")
    return y, dx
