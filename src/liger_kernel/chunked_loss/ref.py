"""The preference losses in plain PyTorch from the logits: the fp64 definition, and eager code as trainers run it."""

import torch
import torch.nn.functional as F
from torch.nn.functional import logsigmoid as logsig


def picked(logits, target, ignore_index=-100):
    """(B, T) log-probabilities of the targets, 0 where ignored; the log-softmax of (B, T, V) logits is fp32 at least."""
    log_p = F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    valid = target != ignore_index
    return torch.where(valid, log_p.gather(-1, torch.where(valid, target, 0)[..., None]).squeeze(-1), 0)


def sequence_log_probs(x, weight, target, bias=None, ignore_index=-100, average=False):
    """((B,) log-probabilities of the sequences, (B, T, V) logits)."""
    logits = F.linear(x, weight, bias)
    logp = picked(logits, target, ignore_index)
    count = (target != ignore_index).sum(-1).clamp(min=1)
    return logp.sum(-1) / count if average else logp.sum(-1), logits


def dpo_losses(kind, c, r, c0, r0, beta, s=0.0, tau=0.05):
    """(n,) losses of the DPO types; c, r: chosen and rejected log-probabilities, c0, r0: the reference model's."""
    a, b = c - c0, r - r0
    d, sig = beta * (a - b), torch.sigmoid
    m = sig(d / tau)
    if kind == "sigmoid":
        return -logsig(d)
    if kind == "hinge":
        return (1 - d).clamp(min=0)
    if kind == "exo_pair":
        s = torch.tensor(s, dtype=d.dtype)
        return sig(d) * (logsig(d) - torch.log1p(-s)) + sig(-d) * (logsig(-d) - torch.log(s))
    if kind == "nca_pair":
        return -logsig(beta * a) - 0.5 * logsig(-beta * a) - 0.5 * logsig(-beta * b)
    if kind == "robust":
        return (-(1 - s) * logsig(d) + s * logsig(-d)) / (1 - 2 * s)
    if kind == "bco_pair":
        return -logsig(beta * a) - logsig(-beta * b)
    if kind == "sppo_hard":
        return (a - 1 / (2 * beta)) ** 2 + (b + 1 / (2 * beta)) ** 2
    if kind == "apo_zero":
        return 1 - sig(beta * a) + sig(beta * b)
    if kind == "apo_down":
        return sig(beta * a) + 1 - sig(d)
    assert kind == "discopop"
    return -logsig(d) * (1 - m) + torch.exp(-d) * m


def log_odds(logp):
    return logp - torch.log(-torch.expm1(logp.clamp(max=-1e-30)))


def paired(loss, x, weight, target, bias=None, ref=None, nll_target=None, ignore_index=-100, beta=0.1, alpha=1.0, nll=False, average=False,
           kind="sigmoid", s=0.0, gamma=0.5, tau=0.05):
    """(loss, metrics) of "dpo", "cpo", "simpo" and "orpo"; `ref` is (input, weight, bias) of the reference model."""
    n = target.shape[0] // 2
    average = average or loss in ("simpo", "orpo")
    logps, logits = sequence_log_probs(x, weight, target, bias, ignore_index, average)
    c, r = logps[:n], logps[n:]
    c0 = r0 = torch.zeros_like(c)
    if ref is not None:
        with torch.no_grad():
            logps0 = sequence_log_probs(ref[0], ref[1], target, ref[2], ignore_index, average)[0]
            c0, r0 = logps0[:n], logps0[n:]
    if loss == "dpo":
        pref, aux = dpo_losses(kind, c, r, c0, r0, beta, s, tau).mean(), (beta * (c - c0), beta * (r - r0))
    elif loss == "orpo":
        o = log_odds(c) - log_odds(r)
        pref, aux = -beta * logsig(o).mean(), (beta * c, beta * r, logsig(o).mean(), o.mean())
    else:
        d = beta * (c - r) - (gamma if loss == "simpo" else 0)
        pref, aux = (-(1 - s) * logsig(d) - s * logsig(-d)).mean(), (beta * c, beta * r)
    nll_loss = torch.zeros_like(pref)
    if nll:
        read = (target if nll_target is None else nll_target)[:n]
        nll_loss = -picked(logits[:n], read, ignore_index).sum() / (read != ignore_index).sum().clamp(min=1)
    mean = logits.detach().flatten(1).mean(1, dtype=pref.dtype)
    return alpha * nll_loss + pref, tuple(t.detach() for t in (c, r, mean[:n].mean(), mean[n:].mean(), nll_loss, *aux))


def kto(x, weight, target, desirable, bias=None, ref=None, kl=None, ignore_index=-100, beta=0.1, average=False):
    """(loss, metrics) of KTO."""
    logps, logits = sequence_log_probs(x, weight, target, bias, ignore_index, average)
    logps0 = torch.zeros_like(logps)
    if ref is not None:
        with torch.no_grad():
            logps0 = sequence_log_probs(ref[0], ref[1], target, ref[2], ignore_index, average)[0]
    ratio = logps - logps0
    y = torch.where(desirable, 1.0, -1.0).to(ratio.dtype)
    loss = (1 - torch.sigmoid(beta * (ratio - (0 if kl is None else kl)) * y)).mean()
    sums = logits.detach().flatten(1).sum(1, dtype=loss.dtype)
    metrics = [t[side].sum().detach() for t in (logps, sums, beta * ratio) for side in (desirable, ~desirable)]
    return loss, tuple(metrics)
