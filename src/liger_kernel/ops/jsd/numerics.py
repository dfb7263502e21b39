"""jsd of log-probabilities."""

from functools import partial

import torch

from liger_kernel.cli.numerics.grid import logit_grid, normal, words
from liger_kernel.ops.jsd.test_jsd import check


def cases(device, dtype):
    for regime, x, _ in logit_grid(device, torch.float32):
        log_q, log_p = (torch.log_softmax(z, -1).to(dtype) for z in (x, normal(x.shape, device, torch.float32, 2.0)))
        yield regime, words(x.shape), partial(check, log_q, log_p, None, 0.5, against_eager=True)
