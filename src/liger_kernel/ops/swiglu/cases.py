"""Shapes and error bounds of swiglu, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

# (rows, cols): tails of every width, model widths, one long row and many short ones.
SHAPES = [(1, 1), (3, 7), (4, 31), (5, 64), (2, 65), (33, 127), (7, 1024), (3, 1025), (6, 3588), (2, 14336), (1, 33000), (3000, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]
UNDERFLOW = 1e-35  # an activation below this may be zero: the CUDA approximations flush subnormals


def relative_error(x):
    """Of silu(x) in fp32: 16 units for the products, the sum and the quotient, and |x| (1 +- 1) units because the argument of
    the exponential is rounded."""
    return (16 + 2 * x.abs().clamp(max=100)) * U32


def value_bound(x, rounded_to=None):
    """Absolute error of silu(x), and of its rounding to the operands' type where there is one."""
    value = x * torch.sigmoid(x)
    extra = (1.01 * UNIT_ROUNDOFF[rounded_to], SMALLEST[rounded_to]) if rounded_to else (0, 0)
    return value.abs() * (relative_error(x) + extra[0]) + extra[1] + UNDERFLOW


def slope_bound(x):
    """silu' = s + silu (1 - s): the errors of both terms, 1 - s in units of 1."""
    s = torch.sigmoid(x)
    return (s + (x * s).abs()) * relative_error(x) + UNDERFLOW


def bounds(dc, a, b, dtype, gate_multiplier=1.0, down_multiplier=1.0):
    """Absolute errors of (c, da, db) before their final rounding, from fp64 operands."""
    few, x = 4 * U32, a * gate_multiplier  # few: the products themselves
    s = torch.sigmoid(x)
    value, slope = (x * s).abs(), s + (x * s).abs()
    up, g = (b * down_multiplier).abs(), (dc * down_multiplier).abs()
    c = (value_bound(x, dtype) + few * value) * up
    da = (slope_bound(x) + few * slope) * g * (b * gate_multiplier).abs()
    return c, da, (value_bound(x) + few * value) * g
