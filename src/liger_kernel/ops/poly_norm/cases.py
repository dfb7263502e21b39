"""Shapes, inputs and error bounds of poly_norm, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.poly_norm import liger_poly_norm
from liger_kernel.ops.poly_norm.ref import eager, reference

# (rows, H): one element, tails of every width, powers of two and their neighbours, model widths, rows too wide for registers.
SHAPES = [(1, 1), (3, 7), (5, 31), (4, 32), (2, 33), (33, 127), (6, 1024), (3, 1025), (9, 4096), (4, 14336), (2, 33000), (3000, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]
EPS = 1e-6


def inputs(shape, device, dtype=torch.float32, parameter_dtype=None, scale=1.0, seed=0):
    """x, weight, bias, dy."""
    torch.manual_seed(seed)
    x, dy = ((torch.randn(shape, device=device) * s).to(dtype) for s in (scale, 1.0))
    weight = torch.tensor([0.7, -0.4, 0.9], device=device).to(parameter_dtype or dtype)
    return x, weight, torch.tensor(0.3, device=device).to(parameter_dtype or dtype), dy


def run(function, x, weight, bias, dy, eps=EPS):
    """(y, dx, dw, db)."""
    x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
    y = function(x, weight, bias, eps)
    y.backward(dy)
    return y, x.grad, weight.grad, bias.grad


def bounds(x, weight, bias, dy, eps=EPS):
    """Absolute errors of (y, dx, dw, db) before their final rounding, from fp64 tensors.

    Each term of a sum carries some 40 fp32 units: its power and products, and the row sum it depends on (a chain of at most 64
    additions, half of whose error reaches rstd). The terms may cancel, so the bound is on the sum of their sizes. dw and db add rows:
    another sqrt(rows) units.
    """
    rows = max(x.numel() // max(x.shape[-1], 1), 1)
    y, dx, dw = bias.abs().expand(x.shape), torch.zeros_like(x), []
    for p, w in zip((3, 2, 1), weight.abs(), strict=True):
        size = x.abs() ** p
        r = ((x ** (2 * p)).mean(-1, keepdim=True) + eps).rsqrt()
        mean = (dy.abs() * size).mean(-1, keepdim=True)
        y = y + w * r * size
        dx = dx + p * w * r * (dy.abs() * x.abs() ** (p - 1) + r * r * mean * x.abs() ** (2 * p - 1))
        dw.append((r * size * dy.abs()).sum())
    least = SMALLEST[torch.float32]
    across = (40 + rows**0.5) * U32
    return 40 * U32 * y + least, 60 * U32 * dx + least, across * torch.stack(dw) + least, across * dy.abs().sum() + least


def check(x, weight, bias, dy, compare_eager=True, eps=EPS):
    """Results and gradients against the definition in fp64, and their error against eager code's."""
    ours = run(liger_poly_norm, x, weight, bias, dy, eps)
    wide = [t.double() for t in (x, weight, bias, dy)]
    truth = run(reference, *wide, eps)
    eagerly = run(eager, x, weight, bias, dy, eps) if compare_eager else (None,) * 4
    for name, got, want, bound, plain in zip(("y", "dx", "dw", "db"), ours, truth, bounds(*wide, eps), eagerly, strict=True):
        assert_accurate(got, want, bound, plain, name)
    return ours
