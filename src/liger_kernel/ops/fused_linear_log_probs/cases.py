"""Shapes and error bounds of fused_linear_log_probs, for its tests and for `liger numerics`."""

import math

import torch
import torch.nn.functional as F

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF
from liger_kernel.ops.fused_linear_log_probs.ref import logits

U32 = UNIT_ROUNDOFF[torch.float32]

# (rows, hidden, vocab). C13: one entry, odd vocabularies, tiles' borders on both devices, 129920.
SHAPES = [(3, 8, 1), (1, 8, 2), (3, 16, 31), (5, 24, 33), (7, 33, 257), (70, 64, 1003), (40, 128, 4096), (600, 32, 515), (4, 16, 129920),
          (3, 64, 50257)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 5.0},
    "logit scale": {"logit_scale": 0.25},
    "ignore index": {"ignore_index": 2},
    "all": {"bias": True, "temperature": 1.5, "softcap": 10.0, "logit_scale": 0.5},
}


def flops(rows, hidden, vocab, products):
    return products * 2 * rows * hidden * vocab


def memory(rows, hidden, vocab, dtype, gradients=True):
    """Bytes of the inputs, and of both gradients: the least that has to move."""
    return (2 if gradients else 1) * (rows + vocab) * hidden * dtype.itemsize


class Bounds:
    """Absolute errors allowed in logp, entropy, lse, dx, dw and db for upstream gradients g = (of logp, of entropy, of lse), in fp64.

    A logit is a sum of `hidden` fp32 products, rounded to the products' dtype (u): it is off by at most
    u |logit| + 4 sqrt(hidden) u32 |x| |w|, and z by `delta`, that times the scale, plus 16 u32 |z|. Then, to first order,

        lse    delta + 16 u32 size                    size: largest |z| + log V + 1
        logp   (1 - p_y) 2 delta + 16 u32 |logp|      plus 16 u32 of size where the target is not the largest
        H      2 delta E + 32 u32 size (H + E)        E = sum p |log p + H|
        p      p (2 delta + 64 u32 size)
        dz     the products of these, and u of being stored

    and both gradients are off by dz's error times the absolute operand plus the fp32 sum of the product.
    """

    def __init__(self, x, weight, target, bias=None, upstream=(None, None, None), ignore_index=-100, dtype=None, **transform):
        dtype = dtype or x.dtype
        u = 0.0 if dtype == torch.float32 else UNIT_ROUNDOFF[dtype]
        x, weight = x.detach().double().reshape(-1, x.shape[-1]), weight.detach().double()
        target = target.reshape(-1)
        raw = F.linear(x, weight, None if bias is None else bias.detach().double())
        z = logits(x, weight, None if bias is None else bias.detach().double(), **transform)
        scale = abs(transform.get("logit_scale", 1.0)) / transform.get("temperature", 1.0)
        # Twice u: a converted bias rounds once more.
        delta = 2 * u * raw.abs().amax(-1) + 4 * math.sqrt(x.shape[1]) * U32 * x.norm(dim=-1) * weight.norm(dim=-1).max()
        delta = delta * scale + 16 * U32 * z.abs().amax(-1)
        valid = target != ignore_index
        y = torch.where(valid, target, 0)[:, None]
        log_p = torch.log_softmax(z, -1)
        p, own = log_p.exp(), log_p.gather(-1, y).squeeze(-1)
        entropy = -(p * log_p).sum(-1)
        size = z.abs().amax(-1) + math.log(z.shape[1]) + 1
        spread = (p * (log_p + entropy[:, None]).abs()).sum(-1)
        rest = -torch.expm1(own)
        behind = z.amax(-1) - z.gather(-1, y).squeeze(-1) > 0
        self.logp = torch.where(valid, 2 * rest * delta + 16 * U32 * (own.abs() + behind * size), 0)
        self.entropy = torch.where(valid, 2 * delta * spread + 32 * U32 * size * (entropy + spread), 0)
        self.lse = torch.where(valid, delta + 16 * U32 * size, 0)

        g = [torch.zeros_like(delta) if d is None else d.detach().reshape(-1).double().abs() for d in upstream]
        relative = (4 * delta + 64 * U32 * size + u)[:, None]
        lean = (log_p + entropy[:, None]).abs()
        hot = torch.zeros_like(p).scatter_(-1, y, 1.0)
        terms = p * (g[0] + g[2])[:, None] + p * lean * g[1][:, None] + hot * (g[0] * rest)[:, None]
        terms = torch.where(hot > 0, hot * (g[0] * rest + own.exp() * g[2])[:, None] + p * lean * g[1][:, None], terms)
        drift = p * (g[1] * (2 * delta + self.entropy + 32 * U32 * size))[:, None]
        self.dz = torch.where(valid[:, None], terms * relative + drift, 0) * scale
        self.terms = torch.where(valid[:, None], terms, 0) * scale
        self.lost = SMALLEST[dtype] if dtype == torch.float16 else 0.0  # fp16 alone has no room below
        self.x, self.weight, self.u = x, weight, u

    def _product(self, a, b, sums):
        error = (self.dz + self.lost) if a else (self.dz + self.lost).mT
        terms = self.terms if a else self.terms.mT
        return error @ b.abs() + ((8 + math.sqrt(sums)) * U32 + self.u) * (terms @ b.abs())

    def dx(self):
        return self._product(True, self.weight, self.weight.shape[0])

    def dw(self):
        return self._product(False, self.x, self.x.shape[0])

    def db(self):
        return (self.dz + self.lost + (8 + math.sqrt(self.x.shape[0])) * U32 * self.terms).sum(0)
