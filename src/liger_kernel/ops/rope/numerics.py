"""rope of queries and keys, with tables in fp32 and in the tensors' dtype."""

from functools import partial

import torch

from liger_kernel.cli.numerics.grid import SCALES, words
from liger_kernel.ops.rope.cases import check, inputs, tables


def cases(device, dtype):
    for regime, shape in (*((regime, (2, 32, 8, 17, 128, 128)) for regime, _ in SCALES), ("long", (1, 2, 1, 4096, 64, 64))):
        tensors = [t * dict(SCALES).get(regime, 1.0) for t in inputs(shape, device, dtype)]
        for table in sorted({torch.float32, dtype}, key=str):
            cos, sin = tables(shape[0], shape[3], shape[5], device, table)
            yield regime, f"{words(shape)} {str(table).removeprefix('torch.')} table", partial(check, *tensors, cos, sin)
