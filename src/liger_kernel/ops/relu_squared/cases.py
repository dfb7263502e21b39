"""Shapes and error bounds of relu_squared, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

# Tails of every width, powers of two and their neighbours, one long row and many short ones, more and fewer than two dimensions.
SHAPES = [(1, 1), (3, 7), (4, 31), (2, 32), (2, 33), (33, 127), (7, 1024), (3, 1025), (1, 33000), (3000, 3), (2, 3, 4, 5), (17,), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bounds(dy, x):
    """Absolute errors of (y, dx) before their final rounding, from fp64 operands: one fp32 product each, which may underflow."""
    u, least = UNIT_ROUNDOFF[torch.float32], SMALLEST[torch.float32]
    up = x.clamp(min=0)
    return u * up * up + least, 2 * u * up * dy.abs() + least
