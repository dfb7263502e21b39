"""group_norm."""

from functools import partial

from liger_kernel.cli.numerics.grid import grid, words
from liger_kernel.ops.group_norm.cases import check, inputs


def cases(device, dtype):
    for regime, shape, scale in grid((4, 64, 16, 16), (1, 4, 100, 130), (300, 8, 16)):
        yield regime, words(shape), partial(check, *inputs(shape, device, dtype, scale=scale), 2)
