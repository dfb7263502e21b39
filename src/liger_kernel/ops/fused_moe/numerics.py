"""fused_moe: tokens through their experts."""

from functools import partial

from liger_kernel.cli.numerics.grid import words
from liger_kernel.ops.fused_moe.cases import inputs
from liger_kernel.ops.fused_moe.test_fused_moe import check


def cases(device, dtype):
    shapes = ("typical", (257, 128, 63, 16, 4), 1.0), ("tiny", (257, 128, 63, 16, 4), 1e-3), ("huge", (257, 128, 63, 16, 4), 10.0), (
        "long", (64, 4096, 32, 4, 2), 1.0)
    for regime, shape, scale in shapes:
        x, *rest = inputs(*shape, dtype, device)
        yield regime, words(shape), partial(check, (x * scale, *rest))
