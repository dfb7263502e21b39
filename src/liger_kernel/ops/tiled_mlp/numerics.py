"""tiled_mlp: a feed-forward layer in pieces."""

from functools import partial

from liger_kernel.cli.numerics.grid import words
from liger_kernel.ops.tiled_mlp.cases import inputs
from liger_kernel.ops.tiled_mlp.test_tiled_mlp import check


def cases(device, dtype):
    for regime, (rows, hidden, inner), scale in (("typical", (257, 128, 63), 1.0), ("tiny", (257, 128, 63), 1e-3),
                                                 ("huge", (257, 128, 63), 10.0)):
        yield regime, words((rows, hidden, inner)), partial(check, inputs((rows,), hidden, inner, dtype, device, scale=scale), 5)
