"""Shapes and error bounds of jsd, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

# (rows, vocab): one, tails of every width, around powers of two, model vocabularies.
SHAPES = [(1, 1), (4, 7), (3, 31), (5, 33), (6, 64), (3, 257), (9, 1000), (4, 2047), (4, 2049), (3, 32000), (2, 50257), (2, 128256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]

U32 = UNIT_ROUNDOFF[torch.float32]


def bytes_moved(rows, vocab, dtype):
    """Both inputs read once and the gradient written once."""
    return 3 * rows * vocab * dtype.itemsize


def _terms(x, y, beta):
    """Per column, what adds up to the loss and to the gradient, by size: probability times (1 + distance to the mixture), fp64."""
    x, y = x.detach().double(), y.detach().double()
    q, p = x.exp(), y.exp()
    distance = torch.where(x == y, 0, x - y).abs().clamp(max=1e30)
    if beta == 0:
        return p * (1 + distance), p
    if beta == 1:
        return q * (1 + distance), q * (1 + distance)
    log_m = (beta * p + (1 - beta) * q).log()
    a, b = (torch.where(m == 0, 0, (v - log_m).abs()) for v, m in ((y, p), (x, q)))
    own = (1 - beta) * q * (1 + b)
    return beta * p * (1 + a) + own, own


def bounds(x, y, shift_labels=None, beta=0.5, ignore_index=-100, upstream=1.0):
    """Absolute errors of the loss and of dx before their last rounding: an exponential carries 8 u32 and the error of its argument,
    |argument| u32; a distance and a logarithm a few u32. dx is rounded once more in forward."""
    loss, grad = _terms(x, y, beta)
    size = torch.maximum(x.detach().double().abs(), y.detach().double().abs()).clamp(max=104)  # e^-104 is 0
    loss, grad = loss * (16 + 4 * size) * U32, grad * (16 + 4 * size) * U32
    count = max(x.shape[0], 1)
    if shift_labels is not None:
        valid = shift_labels != ignore_index
        count = valid.sum().clamp(min=1)
        loss, grad = (torch.where(valid[:, None], t, 0) for t in (loss, grad))
    tiny = 2.0**-116  # exponentials below 2^-126 are 0; times a distance
    scale = abs(float(upstream)) / count
    # fp16 keeps its gradients without the factor 1 / count.
    lost = SMALLEST[x.dtype] * (scale if x.dtype == torch.float16 else max(abs(float(upstream)), 1.0))
    rounding = 0.0 if x.dtype == torch.float32 else UNIT_ROUNDOFF[x.dtype]
    return loss.sum() / count + tiny * x.numel(), grad * scale + lost + tiny, rounding
