"""Shapes and error bounds of tiled_mlp, for its tests and for `liger numerics`; the layer that they and the benchmarks run in pieces."""

import torch
from torch import nn

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF
from liger_kernel.ops.mlp.cases import bounds as of_whole
from liger_kernel.ops.mlp.cases import inputs
from liger_kernel.ops.swiglu import liger_swiglu
from liger_kernel.ops.tiled_mlp.ref import reference

# (shape of x, intermediate, pieces): one piece, more pieces than tokens, pieces of unequal length, no tokens.
SHAPES = [((1, 1, 8), 5, 1), ((2, 7, 24), 20, 3), ((65, 33), 40, 4), ((3, 128, 32), 63, 7), ((5, 16), 24, 9), ((1, 257, 64), 96, None),
          ((2, 0, 16), 24, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

__all__ = ["DTYPES", "SHAPES", "Layer", "bounds", "inputs"]


class Layer(nn.Module):
    """A SwiGLU layer of given weights, which need not be leaves."""

    def __init__(self, gate, up, down):
        super().__init__()
        self.weights = [gate, up, down]

    def parameters(self, recurse=True):
        return iter(self.weights)

    def forward(self, x):
        gate, up, down = self.weights
        linear = nn.functional.linear
        return linear(liger_swiglu(linear(x, gate), linear(x, up)), down)


def bounds(x, gate, up, down, dy, dtype, pieces):
    """Absolute errors of (y, dx, d gate, d up, d down) before their final rounding, from fp64 operands: those of the whole layer, and
    each piece's parameter gradients are rounded to the dtype before they are summed."""
    errors = list(of_whole(x, gate, up, down, dy, dtype))
    for part, upstream in zip(x.chunk(pieces, -2), dy.chunk(pieces, -2), strict=True):
        weights = [w.detach().requires_grad_() for w in (gate, up, down)]
        found = torch.autograd.grad(reference(part, *weights), weights, upstream)
        for i, g in enumerate(found, 2):
            errors[i] = errors[i] + UNIT_ROUNDOFF[dtype] * g.abs() + SMALLEST[dtype]
    return errors
