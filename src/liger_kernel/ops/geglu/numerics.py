"""geglu in both forms of GELU."""

from functools import partial

from liger_kernel.cli.numerics.grid import grid, normal, words
from liger_kernel.ops.geglu.test_geglu import FORMS, check


def cases(device, dtype):
    for regime, shape, scale in grid((64, 1024), (2, 33000)):
        a, b, dc = (normal(shape, device, dtype, s) for s in (scale, scale, 1.0))
        for form in FORMS:
            yield regime, f"{words(shape)} {form}", partial(check, a, b, dc, form)
