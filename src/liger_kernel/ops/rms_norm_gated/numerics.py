"""rms_norm_gated in both orders and casting modes."""

from functools import partial

from liger_kernel.cli.numerics.grid import grid, normal, words
from liger_kernel.ops.rms_norm_gated.test_rms_norm_gated import KINDS, check


def cases(device, dtype):
    for regime, shape, scale in grid((64, 1024), (4, 33000), (4096, 256)):
        x, dy, w = normal(shape, device, dtype, scale), normal(shape, device, dtype), normal(shape[-1:], device, dtype)
        gate = normal(shape, device, dtype, min(scale, 10.0))
        for kind, options in KINDS.items():
            yield regime, f"{words(shape)} {kind}", partial(check, x, gate, w, dy, **options)
