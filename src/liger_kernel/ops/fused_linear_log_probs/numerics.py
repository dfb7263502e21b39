"""fused_linear_log_probs: log-probabilities, entropies and normalisers of a head."""

from functools import partial

import torch

from liger_kernel.cli.numerics.grid import head_grid, words
from liger_kernel.ops.fused_linear_log_probs.ref import eager
from liger_kernel.ops.fused_linear_log_probs.test_fused_linear_log_probs import _differentiate, check, ours, random_upstream


def against_eager(x, weight, target):
    upstream = random_upstream(x.shape[0], x.device)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    logp, entropy = eager(*leaves, target, want_entropy=True)
    lse = torch.nn.functional.linear(*leaves).float().logsumexp(-1)
    check(ours, x, weight, target, upstream=upstream, against=_differentiate((logp, entropy, lse), [*leaves, None], upstream))


def cases(device, dtype):
    for regime, x, weight, target in head_grid(device, dtype):
        yield regime, words((*x.shape, weight.shape[0])), partial(against_eager, x, weight, target)
