"""Log-probabilities and entropies of a linear layer's output in plain PyTorch: the fp64 definition, and eager code as trainers run it."""

import torch
import torch.nn.functional as F


def logits(x, weight, bias=None, temperature=1.0, logit_scale=1.0, softcap=None):
    z = F.linear(x, weight, bias) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z / temperature


def reference(x, weight, target, bias=None, ignore_index=-100, **transform):
    """(logp, entropy, lse) of the target's shape by the definition; run it on fp64 tensors for the truth."""
    z = logits(x, weight, bias, **transform)
    valid = target != ignore_index
    lse = torch.logsumexp(z, -1)
    log_p = torch.log_softmax(z, -1)
    logp = log_p.gather(-1, torch.where(valid, target, 0)[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return tuple(torch.where(valid, t, 0) for t in (logp, entropy, lse))


def eager(x, weight, target, bias=None, temperature=1.0, want_entropy=False):
    """What a trainer runs: the head's matrix product, logits in fp32 over the temperature, log_softmax and gather."""
    z = F.linear(x, weight, bias).float()
    log_p = F.log_softmax(z if temperature == 1.0 else z / temperature, -1)
    logp = log_p.gather(-1, target[..., None]).squeeze(-1)
    return (logp, -(log_p.exp() * log_p).sum(-1)) if want_entropy else logp
