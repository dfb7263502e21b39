"""rms_norm in every casting mode."""

from functools import partial

from liger_kernel.cli.numerics.grid import grid, normal, words
from liger_kernel.ops.rms_norm.test_rms_norm import MODES, check


def cases(device, dtype):
    for regime, shape, scale in grid((64, 1024), (4, 33000), (4096, 256)):
        x, dy, w = normal(shape, device, dtype, scale), normal(shape, device, dtype), normal(shape[-1:], device, dtype)
        for mode in MODES:
            yield regime, f"{words(shape)} {mode}", partial(check, x, w, dy, mode)
