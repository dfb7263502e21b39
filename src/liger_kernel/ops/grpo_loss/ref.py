"""The losses of the GRPO family in plain PyTorch, from log-probabilities and from logits: the fp64 definition."""

import math

import torch


def per_token(logp, mask, advantages, ref_logp=None, old_logp=None, *, loss_type="grpo", level="token", epsilon_low=0.2, epsilon_high=0.2,
              beta=0.0, delta=None, bias_correction=False, tau=(1.0, 1.05), importance=None, vespo=(2.0, 3.0, 3.0, 2.0)):
    """(loss, KL, clip indicator) of (B, T) log-probabilities, none of them masked; (B, 1) where a sequence's tokens share them."""
    a = advantages[:, None]
    d = logp - (logp.detach() if old_logp is None else old_logp)
    if level == "sequence":
        d = (d * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    r = d.exp()
    if importance is not None and importance.dim() == 1:
        importance = importance[:, None]
    clipped = torch.zeros_like(r)
    if loss_type == "cispo":
        loss = -r.clamp(max=epsilon_high).detach() * a * logp
        clipped = (r > epsilon_high) & (a > 0)
    elif loss_type == "sapo":
        t = torch.where(a > 0, tau[0], tau[1])
        loss = -a * 4 / t * torch.sigmoid(t * (r - 1))
    elif loss_type == "vespo":
        log_w = (d.detach().clamp(-20, 20) * mask).sum(1, keepdim=True)
        if importance is not None:
            log_w = log_w + importance.log().clamp(math.log(1e-8), 20).sum(1, keepdim=True)
        log_w = log_w.clamp(math.log(1e-8), 20)
        k, rate = torch.where(a >= 0, vespo[0], vespo[2]), torch.where(a >= 0, vespo[1], vespo[3]).clamp(min=1e-4)
        loss = -torch.exp(rate + k * log_w - rate * log_w.exp()) * a * logp
    else:
        bounded = r if delta is None else r.clamp(max=delta)
        loss = -torch.minimum(bounded * a, r.clamp(1 - epsilon_low, 1 + epsilon_high) * a)
        clipped = ((r < 1 - epsilon_low) & (a < 0)) | ((r > 1 + epsilon_high) & (a > 0))
    if importance is not None and loss_type != "vespo":
        loss = loss * importance
    k = (logp.detach() if ref_logp is None else ref_logp) - logp
    kl = k.exp() - k - 1
    if bias_correction:
        kl = kl * r
    return loss + beta * kl if beta else loss, kl, clipped.to(logp.dtype)


def log_probs(logits, ids, mask, temperature=1.0):
    """(B, L) log-probabilities of the ids under logits (B, L + 1, V) over the temperature; 0 where masked."""
    logp = torch.log_softmax(logits[:, :-1] / temperature, -1).gather(-1, torch.where(mask != 0, ids, 0)[..., None]).squeeze(-1)
    return torch.where(mask != 0, logp, 0)


def reference(logits, ids, mask, advantages, ref_logp=None, old_logp=None, temperature=1.0, **options):
    """(loss, KL, clip indicator), each (B, L) times the mask."""
    logp = log_probs(logits, ids, mask, temperature)
    return tuple(torch.where(mask != 0, t.expand_as(logp), 0) for t in per_token(logp, mask, advantages, ref_logp, old_logp, **options))


def reduced(loss, mask, loss_type, max_completion_length=None, num_items=None):
    """The scalar from masked per-token losses (B, T)."""
    n = mask.sum(1, keepdim=True)
    if loss_type in ("grpo", "sapo"):
        return (loss / n.clamp(min=1)).sum() / len(loss)
    if loss_type == "bnpo":
        return loss.sum() / n.sum().clamp(min=1)
    if loss_type == "dr_grpo":
        return loss.sum() / (len(loss) * (max_completion_length or loss.shape[1]))
    if loss_type == "luspo":
        return (loss * n).mean()
    return loss.sum() / max(1, num_items if num_items is not None else n.sum())


def eager(logits, ids, mask, advantages, ref_logp=None, old_logp=None, temperature=1.0, **options):
    """What a trainer runs: logits in fp32 over the temperature, log_softmax, gather, then the terms; the reduction of the type."""
    loss = reference(logits.float(), ids, mask, advantages, ref_logp, old_logp, temperature, **options)[0]
    return reduced(loss, mask, options.get("loss_type", "grpo"))
