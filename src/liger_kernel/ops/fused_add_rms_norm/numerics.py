"""fused_add_rms_norm in every casting mode."""

from functools import partial

from liger_kernel.cli.numerics.grid import grid, normal, words
from liger_kernel.ops.fused_add_rms_norm.test_fused_add_rms_norm import MODES, check


def cases(device, dtype):
    for regime, shape, scale in grid((64, 1024), (4, 33000), (4096, 256)):
        x, r = (normal(shape, device, dtype, scale) for _ in range(2))
        dy, ds, w = normal(shape, device, dtype), normal(shape, device, dtype), normal(shape[-1:], device, dtype)
        for mode in MODES:
            yield regime, f"{words(shape)} {mode}", partial(check, x, r, w, dy, ds, mode)
