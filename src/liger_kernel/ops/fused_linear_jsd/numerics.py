"""fused_linear_jsd: the distillation of one head into another."""

from functools import partial

from liger_kernel.cli.numerics.grid import head_grid, normal, words
from liger_kernel.ops.fused_linear_jsd.test_fused_linear_jsd import check


def cases(device, dtype):
    for regime, x, weight, target in head_grid(device, dtype):
        scale = x.float().abs().mean().item() * 1.25
        teacher, other = normal(x.shape, device, dtype, scale), normal(weight.shape, device, dtype, 2 / weight.shape[1] ** 0.5)
        yield regime, words((*x.shape, weight.shape[0])), partial(check, (x, weight, teacher, other, target), against_eager=True)
