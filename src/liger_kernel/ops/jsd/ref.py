"""Generalised Jensen-Shannon divergence in plain PyTorch: the fp64 definition, and eager code as trainers write it."""

import torch


def rows(x, y, beta=0.5):
    """(rows,) divergences of log-probabilities `x` (student) and `y` (teacher); run it on fp64 tensors for the truth. Differentiable in x
    as a free variable."""
    def entropy_terms(log_a, log_b, log_c):  # sum A (log B - log C), A = 0 counting for nothing
        a = log_a.exp()
        return torch.where(a == 0, 0, a * torch.where(a == 0, 0, log_b - log_c)).sum(-1)

    if beta == 0:
        return entropy_terms(y, y, x)
    if beta == 1:
        return entropy_terms(x, x, y)
    # By distance, so that M neither underflows nor turns -inf - -inf into NaN.
    top = torch.maximum(x, y).detach()
    top = torch.where(top.isinf(), 0, top)
    m = beta * (y - top).exp() + (1 - beta) * (x - top).exp()
    log_m = top + torch.where(m == 0, 1, m).log()  # a row of zeros is multiplied by nothing but zeros
    return beta * entropy_terms(y, y, log_m) + (1 - beta) * entropy_terms(x, x, log_m)


def reference(x, y, shift_labels=None, beta=0.5, ignore_index=-100):
    """The mean over rows whose label is not ignored; 0 without one."""
    loss = rows(x, y, beta)
    if shift_labels is None:
        return loss.sum() / max(loss.numel(), 1)
    valid = shift_labels != ignore_index
    return torch.where(valid, loss, 0).sum() / valid.sum().clamp(min=1)


def eager(x, y, shift_labels=None, beta=0.5, ignore_index=-100):
    """What a trainer runs: torch's kl_div on log-probabilities in fp32, the mixture by logsumexp."""
    kl = torch.nn.functional.kl_div
    dtype, x, y = x.dtype, x.float(), y.float()
    if beta == 0:
        loss = kl(x, y, reduction="none", log_target=True)
    elif beta == 1:
        loss = kl(y, x, reduction="none", log_target=True)
    else:
        b = torch.tensor(beta, dtype=x.dtype, device=x.device)
        log_m = torch.logsumexp(torch.stack([x + torch.log1p(-b), y + torch.log(b)]), dim=0)
        loss = b * kl(log_m, y, reduction="none", log_target=True) + (1 - b) * kl(log_m, x, reduction="none", log_target=True)
    loss = loss.sum(-1)
    if shift_labels is None:
        return (loss.sum() / max(loss.numel(), 1)).to(dtype)
    valid = shift_labels != ignore_index
    return (torch.where(valid, loss, 0).sum() / valid.sum().clamp(min=1)).to(dtype)
