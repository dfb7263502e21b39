"""cross_entropy of rows of logits, against the loss in fp32 that models run."""

from functools import partial

import torch

from liger_kernel.cli.numerics.grid import logit_grid, words
from liger_kernel.core.accuracy import assert_accurate
from liger_kernel.ops.cross_entropy import liger_cross_entropy
from liger_kernel.ops.cross_entropy.cases import grad_bound, loss_bound
from liger_kernel.ops.cross_entropy.ref import eager, reference


def check(x, target):
    def run(function, x):
        leaf = x.detach().clone().requires_grad_()
        loss = function(leaf, target)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        return loss.detach(), leaf.grad

    ours, eagerly, truth = run(liger_cross_entropy, x), run(eager, x), run(reference, x.double())
    upstream = torch.ones((), device=x.device)
    assert_accurate(ours[0], truth[0], loss_bound(x, target), eagerly[0], "loss")
    assert_accurate(ours[1], truth[1], grad_bound(x, target, upstream, truth[1]), eagerly[1], "dx")


def cases(device, dtype):
    for regime, x, target in logit_grid(device, dtype):
        yield regime, words(x.shape), partial(check, x, target)
