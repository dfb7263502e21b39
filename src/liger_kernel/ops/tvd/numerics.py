"""tvd of two distributions."""

from functools import partial

import torch

from liger_kernel.cli.numerics.grid import logit_grid, normal, words
from liger_kernel.ops.tvd.cases import check


def cases(device, dtype):
    for regime, x, _ in logit_grid(device, torch.float32):
        p, q = (torch.softmax(z, -1).to(dtype) for z in (x, normal(x.shape, device, torch.float32, 2.0)))
        yield regime, words(x.shape), partial(check, p, q, None, True, reduction="batchmean")
