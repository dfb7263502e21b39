"""kl_div of log-probabilities from probabilities."""

from functools import partial

import torch

from liger_kernel.cli.numerics.grid import logit_grid, normal, words
from liger_kernel.ops.kl_div.cases import check


def cases(device, dtype):
    for regime, x, _ in logit_grid(device, torch.float32):
        y = torch.softmax(normal(x.shape, device, torch.float32, 2.0), -1).to(dtype)
        log_q = torch.log_softmax(x, -1).to(dtype)
        yield regime, words(x.shape), partial(check, log_q, y, True, reduction="batchmean")
