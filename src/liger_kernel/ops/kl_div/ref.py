"""KL divergence in plain PyTorch."""

import torch

_REDUCE = {"none": lambda x: x, "sum": lambda x: x.sum(), "mean": lambda x: x.mean(), "batchmean": lambda x: x.sum() / x.shape[0]}


def reference(input, target, reduction="mean", log_target=False, eps=1e-10):
    """The definition; run it on fp64 tensors for the truth."""
    p = target.exp() if log_target else target
    loss = p * ((target if log_target else target.clamp(min=eps).log()) - input)
    return _REDUCE[reduction](torch.where(p == 0, torch.zeros_like(loss), loss))


def eager(input, target, reduction="mean", log_target=False, eps=1e-10):
    """torch's own loss, in the dtype of its operands."""
    return torch.nn.functional.kl_div(input, target, reduction=reduction, log_target=log_target)
