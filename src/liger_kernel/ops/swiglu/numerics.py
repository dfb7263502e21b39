"""swiglu."""

from functools import partial

from liger_kernel.cli.numerics.grid import grid, normal, words
from liger_kernel.ops.swiglu.test_swiglu import check


def cases(device, dtype):
    for regime, shape, scale in grid((64, 1024), (2, 33000)):
        a, b, dc = (normal(shape, device, dtype, s) for s in (scale, scale, 1.0))
        yield regime, words(shape), partial(check, a, b, dc)
