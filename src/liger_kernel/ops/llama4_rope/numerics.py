"""llama4_rope of queries and keys."""

from functools import partial

from liger_kernel.cli.numerics.grid import SCALES, words
from liger_kernel.ops.llama4_rope.cases import check, frequencies, inputs


def cases(device, dtype):
    for regime, shape in (*((regime, (2, 17, 40, 8, 128)) for regime, _ in SCALES), ("long", (1, 4096, 2, 1, 64))):
        tensors = [t * dict(SCALES).get(regime, 1.0) for t in inputs(shape, device, dtype)]
        yield regime, words(shape), partial(check, *tensors, frequencies(shape[0], shape[1], shape[4] // 2, device))
