"""Shapes, inputs and error bounds of dyt, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.dyt import liger_dyt
from liger_kernel.ops.dyt.ref import eager, reference

# (rows, H): one element, tails of every width, powers of two and their neighbours, model widths, wide rows and many rows.
SHAPES = [(1, 1), (3, 7), (5, 31), (4, 32), (2, 33), (33, 127), (6, 1024), (3, 1025), (9, 4096), (2, 33000), (3000, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]


def inputs(shape, device, dtype=torch.float32, parameter_dtype=None, scale=1.0, beta=True):
    """x, alpha, gamma, beta, dy."""
    torch.manual_seed(0)
    x, dy = ((torch.randn(shape, device=device) * s).to(dtype) for s in (scale, 1.0))
    gamma, shift = (torch.randn(shape[-1], device=device).to(parameter_dtype or dtype) for _ in range(2))
    return x, torch.tensor([0.7], device=device).to(parameter_dtype or dtype), gamma, shift if beta else None, dy


def run(function, x, alpha, gamma, beta, dy):
    """(y, dx, dalpha, dgamma, dbeta)."""
    x, alpha, gamma = (t.detach().requires_grad_() for t in (x, alpha, gamma))
    beta = None if beta is None else beta.detach().requires_grad_()
    y = function(x, alpha, gamma, beta)
    y.backward(dy)
    return y, x.grad, alpha.grad, gamma.grad, None if beta is None else beta.grad


def bounds(x, alpha, gamma, beta, dy):
    """Absolute errors of (y, dx, dalpha, dgamma, dbeta) before their final rounding, from fp64 tensors.

    tanh has 3 fp32 units and the rounding of its argument, which moves it by at most one more; 1 - t^2 has twice those of t in units
    of 1. Sums over rows add sqrt(rows) units of the sum of their terms' sizes.
    """
    t = torch.tanh(alpha * x).abs()
    least, across = SMALLEST[torch.float32], x.numel() ** 0.5 / max(x.shape[-1], 1) ** 0.5
    y = 8 * U32 * (t * gamma.abs() + (0 if beta is None else beta.abs()))
    s = (dy * gamma).abs()
    dx = s * alpha.abs() * (12 + 6 * (1 - t * t)) * U32
    dalpha = ((24 + across) * U32 * s * x.abs()).sum().view(alpha.shape)
    dgamma = ((8 + across) * U32 * dy.abs() * t).reshape(-1, x.shape[-1]).sum(0)
    dbeta = ((8 + across) * U32 * dy.abs()).reshape(-1, x.shape[-1]).sum(0)
    return y + least, dx + least, dalpha + least, dgamma + least, dbeta + least


def check(x, alpha, gamma, beta, dy, compare_eager=True):
    """Results and gradients against the definition in fp64, and their error against eager code's."""
    ours = run(liger_dyt, x, alpha, gamma, beta, dy)
    wide = [None if t is None else t.double() for t in (x, alpha, gamma, beta, dy)]
    truth, limits = run(reference, *wide), bounds(*wide)
    eagerly = run(eager, x, alpha, gamma, beta, dy) if compare_eager else (None,) * 5
    for name, got, want, bound, plain in zip(("y", "dx", "dalpha", "dgamma", "dbeta"), ours, truth, limits, eagerly, strict=True):
        if want is None:
            assert got is None, name
        else:
            assert_accurate(got, want, bound, plain, name)
    return ours
