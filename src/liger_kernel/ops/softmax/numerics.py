"""softmax."""

from functools import partial

from liger_kernel.cli.numerics.grid import logit_grid, normal, words
from liger_kernel.ops.softmax.cases import check


def cases(device, dtype):
    for regime, x, _ in logit_grid(device, dtype):
        yield regime, words(x.shape), partial(check, x, normal(x.shape, device, dtype))
