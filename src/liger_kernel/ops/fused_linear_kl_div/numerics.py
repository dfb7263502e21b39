"""fused_linear_kl_div: a head and its divergence from given probabilities."""

from functools import partial

import torch

from liger_kernel.cli.numerics.grid import confident, head_grid, words
from liger_kernel.ops.fused_linear_kl_div.test_fused_linear_kl_div import check


def cases(device, dtype):
    for regime, x, weight, target in head_grid(device, dtype):
        logits = confident(x.shape[0], weight.shape[0], device, torch.float32, target, 20.0 if regime == "confident" else 3.0)
        p = torch.softmax(logits, -1).to(dtype)
        yield regime, words((*x.shape, weight.shape[0])), partial(check, (x, weight, p, None), against_eager=True)
