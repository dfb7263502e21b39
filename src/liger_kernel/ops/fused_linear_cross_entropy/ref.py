"""Fused linear cross entropy in plain PyTorch: the fp64 definition, and eager code as Hugging Face models run it."""

import torch
import torch.nn.functional as F

from liger_kernel.ops.cross_entropy import ref as cross_entropy


def reference(x, weight, target, bias=None, ce_weight=None, use_token_scaling=False, logit_scale=1.0, ignore_index=-100,
              reduction="mean", **options):
    """(loss, z) by the definition; run it on fp64 tensors for the truth."""
    logits = F.linear(x, weight, bias) * logit_scale
    loss, z = cross_entropy.rows(logits, target, weight=ce_weight, ignore_index=ignore_index, reduction=reduction, **options)
    if use_token_scaling:
        softcap = options.get("softcap")
        capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        own = torch.softmax(capped, -1).gather(-1, torch.where(target == ignore_index, 0, target)[:, None]).squeeze(-1).detach()
        loss, z = loss * own, z * own
    return (loss, z) if reduction == "none" else (loss.sum(), z.sum())


def eager(x, weight, target, bias=None, softcap=None, logit_scale=1.0, **options):
    """What a Hugging Face model runs: the head's matrix product, logits in fp32, torch's loss."""
    logits = (F.linear(x, weight, bias) * logit_scale).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, target, **options)
