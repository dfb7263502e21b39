"""Shapes and error bounds of cross_entropy, for its tests and for `liger numerics`."""

import math

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

# (rows, vocab): one, tails of every width, around powers of two, model vocabularies (C26: beyond 65536).
SHAPES = [(1, 1), (4, 7), (3, 31), (5, 33), (6, 64), (3, 257), (9, 1000), (4, 4097), (3, 32000),
          (2, 46336), (2, 50257), (2, 65537), (2, 102400)]
LARGE = [(2, 128256), (2, 131072), (1, 151936), (2, 262144), (2, 1048576)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"lse_square_scale": 1e-2},
    "softcap": {"softcap": 30.0},
    "weight": {"weight": True},
    "all": {"weight": True, "label_smoothing": 0.2, "lse_square_scale": 1e-3, "softcap": 10.0},
}


def bytes_moved(rows, vocab, dtype):
    """The logits read once and the gradient written once."""
    return 2 * rows * vocab * torch.finfo(dtype).bits // 8


def _weights(x, target, weight, reduction, ignore_index):
    """Per row, the class weight of the target (0 when ignored), and the divisors of loss and z."""
    valid = target != ignore_index
    w = torch.ones(x.shape[-1], dtype=torch.float64, device=x.device) if weight is None else weight.double()
    own = torch.where(valid, w[torch.where(valid, target, 0)], 0)
    mean = reduction == "mean"
    return w, valid, own, own.sum() if mean else 1.0, valid.sum() if mean else 1.0


def loss_bound(x, target, weight=None, label_smoothing=0.0, softcap=None, lse_square_scale=0.0, reduction="mean", ignore_index=-100):
    """Absolute error of the loss: each row's lse and x_y carry 16 u32 of the largest |x| + log V, z twice the relative error of
    lse; rows add up."""
    size = x.double().abs().amax(-1)
    size = (size if softcap is None else size.clamp(max=softcap)) + math.log(x.shape[-1]) + 1
    w, valid, own, total, count = _weights(x, target, weight, reduction, ignore_index)
    rows = ((1 - label_smoothing) * own + label_smoothing * w.mean()) * size / total + 2 * lse_square_scale * size.square() / count
    rows = 16 * UNIT_ROUNDOFF[torch.float32] * torch.where(valid, rows, 0)
    return rows if reduction == "none" else rows.sum()


def grad_bound(x, target, upstream, grad, weight=None, label_smoothing=0.0, softcap=None, lse_square_scale=0.0, reduction="mean",
               ignore_index=-100):
    """Absolute error of dlogits before the last rounding: relative errors of the terms that add up to it (exponentials carry the
    error of their argument, |x| u32), of the slope of the cap, 1 - t^2, and the first rounding, in forward, of the stored gradient."""
    x64 = x.double()
    t = torch.zeros_like(x64) if softcap is None else torch.tanh(x64 / softcap)
    capped = x64 if softcap is None else softcap * t
    w, valid, own, total, count = _weights(x, target, weight, reduction, ignore_index)
    p = torch.softmax(capped, -1)
    hot = torch.zeros_like(p).scatter_(-1, torch.where(valid, target, 0)[:, None], 1.0)
    terms = ((1 - label_smoothing) * own[:, None] * (p - hot).abs() + label_smoothing / x.shape[-1] * (p * w.sum() + w)) / total
    terms = terms + 2 * lse_square_scale * torch.logsumexp(capped, -1, keepdim=True).abs() * p / count
    factor = upstream.double().abs().reshape(-1, 1)
    largest = capped.abs().amax(-1, keepdim=True)
    relative = (32 + 8 * largest) * (1 - t * t) + 16 * t.abs()
    stored = 0 if x.dtype == torch.float32 else UNIT_ROUNDOFF[x.dtype] * grad.abs() + SMALLEST[x.dtype] * factor
    stored = stored + 2.0**-126 * (1 + factor)  # exponentials below the normal numbers are 0
    return torch.where(valid[:, None], terms * factor * relative, 0) * UNIT_ROUNDOFF[torch.float32] + stored
