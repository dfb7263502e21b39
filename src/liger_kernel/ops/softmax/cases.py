"""Shapes, inputs and error bounds of softmax, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.softmax import liger_softmax
from liger_kernel.ops.softmax.ref import eager, reference

# (rows, V): one element, tails of every width, powers of two and their neighbours, vocabularies, rows beyond 65536 columns (C26).
SHAPES = [(1, 1), (3, 7), (5, 31), (4, 32), (2, 33), (33, 127), (7, 1000), (6, 1024), (3, 1025), (5, 4096), (3, 4104), (2, 50257),
          (2, 65537), (2, 131072)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]
LEAST = 2.0**-125  # below it an exponential may be 0


def inputs(shape, device, dtype=torch.float32, scale=2.0):
    """x, dy."""
    torch.manual_seed(0)
    return tuple((torch.randn(shape, device=device) * s).to(dtype) for s in (scale, 1.0))


def run(function, x, dy):
    """(y, dx)."""
    x = x.detach().requires_grad_()
    y = function(x)
    y.backward(dy)
    return y, x.grad


def forward_bound(x):
    """Absolute error of y before its rounding, from fp64. The argument x - max is rounded, and again when it is scaled for a base-2
    exponential: each costs |x - max| units; the exponentials 2 units each, the sum of n terms sqrt(n)."""
    z = (x - x.amax(-1, keepdim=True)).abs()
    return (16 + 3 * z + x.shape[-1] ** 0.5) * U32 * reference(x) + LEAST


def backward_bound(y, dy):
    """Of dx, from the y that forward saved: the sum of n products has sqrt(n) units of their sizes."""
    n = y.shape[-1]
    sizes = (dy * y).abs().sum(-1, keepdim=True)
    return y * U32 * (4 * dy.abs() + (8 + n**0.5) * sizes) + LEAST


def check(x, dy, compare_eager=True):
    """Result and gradient against the definition in fp64, and their error against eager code's.

    The gradient is held against the formula at the y that was saved, and, where y is fp32, against the definition."""
    y, dx = run(liger_softmax, x, dy)
    wide_x, wide_dy, saved = x.double(), dy.double(), y.detach().double()
    plain = run(eager, x, dy) if compare_eager else (None, None)
    assert y.dtype == dx.dtype == x.dtype
    assert_accurate(y, reference(wide_x), forward_bound(wide_x), plain[0], "y")
    want = saved * (wide_dy - (wide_dy * saved).sum(-1, keepdim=True))
    assert_accurate(dx, want, backward_bound(saved, wide_dy), None, "dx of the saved y")
    if x.dtype == torch.float32:
        truth = run(reference, wide_x, wide_dy)[1]
        sizes = wide_dy.abs() + (wide_dy * saved).abs().sum(-1, keepdim=True)
        assert_accurate(dx, truth, backward_bound(saved, wide_dy) + 2 * forward_bound(wide_x) * sizes, plain[1], "dx")
    return y, dx
