"""dyt."""

from functools import partial

from liger_kernel.cli.numerics.grid import grid, words
from liger_kernel.ops.dyt.cases import check, inputs


def cases(device, dtype):
    for regime, shape, scale in grid((64, 1024), (4, 33000), (3000, 64)):
        yield regime, words(shape), partial(check, *inputs(shape, device, dtype, scale=scale))
