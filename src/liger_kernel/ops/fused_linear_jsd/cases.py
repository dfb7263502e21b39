"""Shapes, options and error bounds of the distillation losses, for their tests and for `liger numerics`."""

import math

import torch
import torch.nn.functional as F

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

U32 = UNIT_ROUNDOFF[torch.float32]

# (rows, student hidden, teacher hidden, vocab): vocabularies that are no multiple of a tile, odd ones, one.
SHAPES = [(1, 8, 8, 2), (4, 16, 24, 1), (3, 16, 8, 31), (5, 24, 24, 33), (7, 33, 17, 257), (70, 64, 96, 1003), (40, 128, 64, 4096),
          (300, 32, 48, 515), (4, 16, 16, 32003)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

OPTIONS = {
    "forward": {"beta": 0.0},
    "jsd": {"beta": 0.5},
    "jsd 0.1": {"beta": 0.1, "temperature": 2.0},
    "reverse": {"beta": 1.0, "temperature": 0.7},
    "bias": {"bias": True, "beta": 0.3},
    "larger teacher": {"beta": 0.5, "teacher_vocab": 13, "temperature": 1.5},
    "larger teacher, forward": {"beta": 0.0, "teacher_vocab": 3, "hard_weight": 0.5},
    "hard": {"beta": 0.5, "hard_weight": 0.4, "soft_weight": 0.6},
    "hard, tempered": {"beta": 0.2, "hard_weight": 0.5, "soft_weight": 2.0, "temperature": 3.0, "bias": True},
    "sum": {"beta": 0.5, "mean": False, "factor": 0.25},
    "ignore index": {"beta": 0.5, "hard_weight": 1.0, "ignore_index": 2},
    "cosine": {"divergence": "cosine", "beta": 0.5, "temperature": 2.0},
    "cosine, hard": {"divergence": "cosine", "beta": 1.5, "hard_weight": 0.5, "bias": True, "teacher_vocab": 5},
    "probabilities": {"divergence": "probabilities", "temperature": 1.3},
}


def flops(rows, hidden, vocab, products=4):
    """The logits of both heads, dx and dw take one product each."""
    return products * 2 * rows * hidden * vocab


def memory(rows, hidden, vocab, dtype):
    """Bytes of the inputs of both heads and of both gradients: the least that has to move."""
    return 3 * (rows + vocab) * hidden * dtype.itemsize


class Bounds:
    """Absolute errors allowed in loss, dx, dw and db, from fp64 logits.

    A logit is off by `delta`, at most u |z| (twice, where a bias or a second product rounds again) + 4 sqrt(hidden) u32 |x| |w|; after
    the temperature, a log-probability by twice that, and by the fp32 of the kernel. A column of dlogits is a probability times a distance
    of log-probabilities: it is off by the probability times (2 + distance) times those. Both gradients are then off by that error times the
    absolute operand, by u of dlogits being stored, and by the fp32 sum of the product.
    """

    def __init__(self, x, weight, teacher, teacher_weight=None, target=None, bias=None, teacher_bias=None, divergence="jsd", beta=0.5,
                 temperature=1.0, ignore_index=-100, soft_weight=1.0, hard_weight=0.0, mean=True, factor=1.0, eps=1e-10, dtype=None):
        dtype = dtype or x.dtype
        u = 0.0 if dtype == torch.float32 else UNIT_ROUNDOFF[dtype]
        wide = [None if t is None else t.detach().double() for t in (x, weight, bias, teacher, teacher_weight, teacher_bias)]

        def logits(a, w, b):
            z = F.linear(a, w, b)
            return z, 2 * u * z.abs().amax(-1) + 4 * math.sqrt(a.shape[1]) * U32 * a.norm(dim=-1) * w.norm(dim=-1).max()

        (z, own), vocab = logits(*wide[:3]), weight.shape[0]
        t, other = (wide[3], torch.zeros_like(own)) if teacher_weight is None else logits(*wide[3:])
        size = torch.maximum(z.abs().amax(-1), t.abs().amax(-1)) / temperature + math.log(t.shape[1]) + 1
        delta = 2 * (own + other) / temperature + 32 * U32 * size
        if divergence == "cosine":
            # Relative errors of the norms and of the columns: an element off by delta, norms by its norm.
            zn, tn = z.norm(dim=-1) + 1e-30, t.norm(dim=-1) + 1e-30
            share = (own * math.sqrt(vocab) / zn + other * math.sqrt(t.shape[1]) / tn) * 4 + 64 * U32
            soft, terms = abs(beta) * share, abs(beta) * (z.abs() / zn.square()[:, None] + t[:, :vocab].abs() / (zn * tn)[:, None])
            error = terms * share[:, None] + abs(beta) * (own / zn.square() + other / (zn * tn))[:, None]
        else:
            log_q = torch.log_softmax(F.pad(z / temperature, (0, t.shape[1] - vocab)), -1)
            q, p = log_q.exp(), t
            if divergence == "probabilities":
                soft = (p * (2 + (p.clamp(min=eps).log() - log_q).abs())).sum(-1) * delta
                terms = (q * p.sum(-1, keepdim=True) + p) / temperature
                error = terms * delta[:, None]
            else:
                log_p = torch.log_softmax(t / temperature, -1)
                p = log_p.exp()
                distance = (log_p - log_q).abs()
                mean_distance = (q * distance).sum(-1, keepdim=True)
                soft = (torch.maximum(p, q) * (2 + distance)).sum(-1) * delta
                terms = (q + p if beta == 0 else q * (distance + mean_distance))[:, :vocab] / temperature
                error = ((q + p) * (2 + distance + mean_distance))[:, :vocab] * delta[:, None] / temperature
        n = torch.ones((), dtype=torch.float64, device=x.device)
        valid = torch.ones_like(own, dtype=torch.bool) if target is None else target != ignore_index
        if mean:
            n = valid.sum().clamp(min=1).double()
        loss, terms, error = soft * soft_weight, terms * soft_weight, error * soft_weight
        if hard_weight:
            y = torch.where(valid, target, 0)
            q = torch.softmax(z, -1)
            rest = (q - F.one_hot(y, vocab)).abs() * hard_weight
            delta = 2 * own + 32 * U32 * (z.abs().amax(-1) + math.log(vocab) + 1)
            loss = loss + hard_weight * 2 * delta
            terms, error = terms + rest, error + (rest + hard_weight * q) * delta[:, None] * 2
        scale = torch.where(valid, abs(factor) / n, 0)
        self.loss = (loss * scale).sum()
        self.terms, self.error = terms * scale[:, None], error * scale[:, None] + u * terms * scale[:, None]
        # fp16 alone has no room below: a step of what dlogits are stored as, which for a mean is n times larger.
        # Elsewhere exponentials below 2^-126 are 0, times a distance.
        self.lost = SMALLEST[dtype] / float(n) if dtype == torch.float16 else 2.0**-116
        self.x, self.weight, self.u = wide[0], wide[1], u

    def dx(self):
        vocab = self.weight.shape[0]
        return (self.error + self.lost) @ self.weight.abs() + ((8 + math.sqrt(vocab)) * U32 + self.u) * (self.terms @ self.weight.abs())

    def dw(self):
        x, rows = self.x.abs(), self.x.shape[0]
        return (self.error + self.lost).mT @ x + ((8 + math.sqrt(rows)) * U32 + self.u) * (self.terms.mT @ x)

    def db(self):
        return (self.error + self.lost + (8 + math.sqrt(self.x.shape[0])) * U32 * self.terms).sum(0)
