"""Shapes and error bounds of fused_linear_cross_entropy, for its tests and for `liger numerics`."""

import math

import torch
import torch.nn.functional as F

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

U32 = UNIT_ROUNDOFF[torch.float32]

# (rows, hidden, vocab). C13: vocabularies that are no multiple of a tile; odd ones take a body and a rest on CUDA.
SHAPES = [(1, 8, 2), (4, 16, 1), (3, 16, 31), (5, 24, 33), (7, 33, 257), (70, 64, 1003), (40, 128, 4096), (600, 32, 515), (4, 16, 129920),
          (3, 64, 50257)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"lse_square_scale": 1e-2},
    "softcap": {"softcap": 5.0},
    "class weight": {"ce_weight": True},
    "token scaling": {"use_token_scaling": True},
    "logit scale": {"logit_scale": 0.25},
    "ignore index": {"ignore_index": 2},
    "all": {"bias": True, "ce_weight": True, "label_smoothing": 0.2, "lse_square_scale": 1e-3, "softcap": 10.0, "use_token_scaling": True,
            "logit_scale": 0.5},
}


def flops(rows, hidden, vocab, products=3):
    """Logits, dx and dw take one product each."""
    return products * 2 * rows * hidden * vocab


def memory(rows, hidden, vocab, dtype):
    """Bytes of the inputs and both gradients: the least that has to move."""
    return 2 * (rows + vocab) * hidden * dtype.itemsize


class Bounds:
    """Absolute errors allowed in loss, dx, dw and db, from fp64 logits.

    A logit is a sum of `hidden` fp32 products, rounded to the products' dtype (u): it is off by `delta`, at most
    u |z| + 4 sqrt(hidden) u32 |x| |w|. A probability is then off by the factor 1 + 2 delta, dlogits by that, 64 u32 of the kernel
    and u of being stored, and both gradients by that error times the absolute operand, plus the fp32 sum of the product.
    """

    def __init__(self, x, weight, target, bias=None, ce_weight=None, label_smoothing=0.0, lse_square_scale=0.0, softcap=None,
                 use_token_scaling=False, logit_scale=1.0, ignore_index=-100, reduction="mean", dtype=None):
        dtype = dtype or x.dtype
        u = 0.0 if dtype == torch.float32 else UNIT_ROUNDOFF[dtype]
        x, weight = x.detach().double(), weight.detach().double()
        z = F.linear(x, weight, None if bias is None else bias.detach().double())
        # Twice u: a CUDA host's second product of an odd vocabulary, or a converted bias, rounds once more.
        delta = 2 * u * z.abs().amax(-1) + 4 * math.sqrt(x.shape[1]) * U32 * x.norm(dim=-1) * weight.norm(dim=-1).max()
        delta, z = delta * abs(logit_scale), z * logit_scale
        capped = z if softcap is None else softcap * torch.tanh(z / softcap)
        valid = target != ignore_index
        y = torch.where(valid, target, 0)
        w = torch.ones_like(z[0]) if ce_weight is None else ce_weight.double()
        p, lse = torch.softmax(capped, -1), torch.logsumexp(capped, -1)
        own, total, count = w[y], w[y][valid].sum(), valid.sum()
        if reduction != "mean":
            total = count = 1.0
        s = label_smoothing
        share = p.gather(-1, y[:, None]).squeeze(-1) if use_token_scaling else torch.ones_like(lse)
        slope = ((1 - s) * own + s * w.mean()) / total + 2 * lse_square_scale * (lse.abs() + 1) / count
        size = capped.abs().amax(-1) + math.log(z.shape[1]) + 1
        rows = (2 * delta + 32 * U32 * size) * slope * share * (1 + 2 * size * bool(use_token_scaling))
        rows = torch.where(valid, rows, 0)
        self.loss = rows if reduction == "none" else rows.sum()
        hot = torch.zeros_like(p).scatter_(-1, y[:, None], 1.0)
        terms = p * slope[:, None] + hot * (own * (1 - s) / total)[:, None] + s / z.shape[1] * w / total
        relative = 4 * delta + 64 * U32 * size + u
        self.dz = torch.where(valid[:, None], terms * relative[:, None] * share[:, None], 0) * abs(logit_scale)
        self.terms = torch.where(valid[:, None], terms * share[:, None], 0) * abs(logit_scale)
        # fp16 alone has no room below: a step of what dlogits are stored as, which for the mean is count times larger.
        self.lost = SMALLEST[dtype] / max(float(count), 1.0) if dtype == torch.float16 else 0.0
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
