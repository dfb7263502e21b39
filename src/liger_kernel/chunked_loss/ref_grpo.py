"""The fused linear GRPO losses in plain PyTorch: the fp64 definition, and unfused code as trainers run it."""

import torch
import torch.nn.functional as F

from liger_kernel.ops.grpo_loss.ref import per_token, reduced


def log_probs(x, weight, ids, bias=None, temperature=1.0, upcast=lambda z: z):
    logits = upcast(F.linear(x, weight, bias)) / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1)


def loss_of(logp, mask, advantages, ref_logp=None, old_logp=None, *, max_completion_length=None, num_items=None, **options):
    """(loss, mean KL, clip ratio) of (B, T) log-probabilities."""
    loss_type = options.get("loss_type", "dapo")
    loss, kl, clipped = per_token(logp, mask, advantages, ref_logp, old_logp, **(options | {"loss_type": loss_type}))
    tokens = mask.sum().clamp(min=1)
    if loss_type == "luspo":  # not masked beyond the length
        total = (loss * mask.sum(1, keepdim=True)).mean()
    else:
        total = reduced(torch.where(mask != 0, loss.expand_as(logp), 0), mask, loss_type, max_completion_length, num_items)
    return total, *(torch.where(mask != 0, t.expand_as(logp), 0).sum() / tokens for t in (kl, clipped))


def reference(x, weight, ids, mask, advantages, bias=None, ref_logp=None, old_logp=None, temperature=1.0, **options):
    """(loss, mean KL, clip ratio); run it on fp64 tensors for the truth."""
    return loss_of(log_probs(x, weight, ids, bias, temperature), mask, advantages, ref_logp, old_logp, **options)


def eager(x, weight, ids, mask, advantages, bias=None, ref_logp=None, old_logp=None, temperature=1.0, **options):
    """The head's product, logits in fp32 over the temperature, log_softmax, gather, the terms."""
    logp = log_probs(x, weight, ids, bias, temperature, upcast=torch.Tensor.float)
    return loss_of(logp, mask, advantages, ref_logp, old_logp, **options)
