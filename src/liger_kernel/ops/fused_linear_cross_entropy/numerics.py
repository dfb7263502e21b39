"""fused_linear_cross_entropy: a language-model head and its loss."""

from functools import partial

from liger_kernel.cli.numerics.grid import head_grid, words
from liger_kernel.ops.fused_linear_cross_entropy.test_fused_linear_cross_entropy import check


def cases(device, dtype):
    for regime, x, weight, target in head_grid(device, dtype):
        yield regime, words((*x.shape, weight.shape[0])), partial(check, x, weight, target, against_eager=True)
