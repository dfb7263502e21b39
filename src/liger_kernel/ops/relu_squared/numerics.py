"""relu_squared."""

from functools import partial

from liger_kernel.cli.numerics.grid import grid, normal, words
from liger_kernel.ops.relu_squared.test_relu_squared import check


def cases(device, dtype):
    for regime, shape, scale in grid((64, 1024), (2, 33000)):
        yield regime, words(shape), partial(check, normal(shape, device, dtype, scale), normal(shape, device, dtype))
