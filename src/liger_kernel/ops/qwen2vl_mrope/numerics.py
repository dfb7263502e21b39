"""qwen2vl_mrope of queries and keys."""

from functools import partial

from liger_kernel.cli.numerics.grid import SCALES, words
from liger_kernel.ops.qwen2vl_mrope.cases import check, inputs, tables


def cases(device, dtype):
    sections = (16, 24, 24)
    for regime, shape in (*((regime, (2, 28, 4, 17)) for regime, _ in SCALES), ("long", (1, 2, 1, 4096))):
        tensors = [t * dict(SCALES).get(regime, 1.0) for t in inputs((*shape, sections), device, dtype)]
        cos, sin = tables(shape[0], shape[3], sum(sections), device)
        yield regime, words((*shape, 128)), partial(check, *tensors, cos, sin, sections)
