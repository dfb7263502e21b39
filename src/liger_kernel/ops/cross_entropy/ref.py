"""Cross entropy in plain PyTorch: the fp64 definition, and eager code as Hugging Face models run it."""

import torch


def rows(logits, target, weight=None, ignore_index=-100, label_smoothing=0.0, softcap=None, lse_square_scale=0.0, reduction="mean"):
    """Per-row (loss with z, z) by the definition, already divided for "mean"; run it on fp64 tensors for the truth."""
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    valid = target != ignore_index
    y = torch.where(valid, target, 0)
    w = torch.ones_like(x[0]) if weight is None else weight.to(x.dtype)
    log_p = torch.log_softmax(x, -1)
    nll = -log_p.gather(-1, y[:, None]).squeeze(-1)
    lse = torch.logsumexp(x, -1)
    loss = (1 - label_smoothing) * w[y] * nll
    if label_smoothing:
        loss = loss - label_smoothing / x.shape[-1] * (w * log_p).sum(-1)
    z = lse_square_scale * lse.square()
    if reduction == "mean":
        count = valid.sum()
        loss = loss / (count if weight is None else w[y][valid].sum())
        z = z / count
    loss, z = (torch.where(valid, t, 0) for t in (loss, z))
    return loss + z, z


def reference(logits, target, **options):
    """(loss, z) reduced; zero rows give 0."""
    loss, z = rows(logits, target, **options)
    return (loss, z) if options.get("reduction", "mean") == "none" else (loss.sum(), z.sum())


def eager(logits, target, softcap=None, lse_square_scale=0.0, **options):
    """What a Hugging Face model runs: logits in fp32, torch's loss. z-loss is not part of it."""
    wide = logits.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    return torch.nn.functional.cross_entropy(wide, target, **options).to(logits.dtype)
