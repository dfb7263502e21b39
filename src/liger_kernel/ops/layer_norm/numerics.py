"""layer_norm."""

from functools import partial

from liger_kernel.cli.numerics.grid import grid, normal, words
from liger_kernel.ops.layer_norm.test_layer_norm import check


def cases(device, dtype):
    for regime, shape, scale in grid((64, 1024), (4, 33000), (4096, 256)):
        x, dy = normal(shape, device, dtype, scale), normal(shape, device, dtype)
        w, b = (normal(shape[-1:], device, dtype) for _ in range(2))
        yield regime, words(shape), partial(check, x, w, b, dy)
