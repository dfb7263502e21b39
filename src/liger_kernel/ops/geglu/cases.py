"""Error bounds of geglu, for its tests and for `liger numerics`; its shapes are swiglu's."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF
from liger_kernel.ops.swiglu.cases import DTYPES, SHAPES, U32, UNDERFLOW

__all__ = ["DTYPES", "SHAPES", "bounds"]


def relative_error(a):
    """Of gelu(a) in fp32: 16 units for products and polynomials, and four roundings of the exponential's argument, which is
    1.6 |a| + 0.072 |a|^3 (tanh form) or a^2 / 2 (exact form). Beyond 12 the activation is a or underflows."""
    x = a.abs().clamp(max=12)
    return (16 + 4 * (1.6 * x + 0.072 * x**3)) * U32


def bounds(dc, a, b, dtype):
    """Absolute errors of (c, da, db) before their final rounding, from fp64 operands. Both forms of gelu lie within 5e-4 of
    each other, far below these bounds' slack."""
    cdf = torch.special.ndtr(a)
    near = a.clamp(-12, 12)
    value = (a * cdf).abs() * (relative_error(a) + 1.01 * UNIT_ROUNDOFF[dtype]) * 1.01 + SMALLEST[dtype] + UNDERFLOW
    # gelu' = s + gelu (1 - s) (k1 + 3 k3 a^2), and cdf + a density: 1 - s carries an error in units of 1.
    slope = (cdf + (near * cdf).abs() * (1.6 + 0.22 * near.square())) * relative_error(a) * 1.01 + UNDERFLOW
    tail = 1e-6 * (a < -3)  # the two forms differ there in ratio, not in size
    few = 1 + 4 * U32
    return (value + tail) * b.abs() * few, (slope + tail) * (dc * b).abs() * few, (value + tail) * dc.abs() * few
