"""Shapes and error bounds of selective_log_softmax, for its tests and for `liger numerics`."""

import math

import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF

U32 = UNIT_ROUNDOFF[torch.float32]

# (sequences, tokens, vocabulary)
SHAPES = [(1, 1, 1), (2, 3, 2), (3, 4, 31), (2, 5, 33), (2, 3, 257), (3, 7, 1003), (2, 2, 4096), (2, 3, 32003), (1, 2, 151936)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def memory(sequences, tokens, vocab, dtype):
    """Bytes of the logits: read once forward, read and written once backward."""
    return sequences * tokens * vocab * dtype.itemsize


class Bounds:
    """Absolute errors allowed in logp, entropy and the logits' gradient for upstream gradients of the two, in fp64.

    The logits are exact. z = logit / T is off by 2 u32 |z| and its exponential by 4 u32, sums are fp32 or better. With size = largest
    |z| + log V + 1 (differences z - largest reach twice the largest |z|):

        logp   16 u32 size        entropy   32 u32 size (1 + entropy)        p   p 32 u32 size

    and dz is a product of these, over T, rounded once more where it is stored. Exponentials below e^-87.3 are taken for 0, and the
    conversion to bf16 may do so with subnormal numbers.
    """

    def __init__(self, logits, index, temperature=1.0, d_logp=None, d_entropy=None, ignore_index=-100):
        z = logits.detach().double() / temperature
        valid = (index != ignore_index)[..., None]
        log_p = torch.log_softmax(z, -1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        size = z.abs().amax(-1, keepdim=True) + math.log(z.shape[-1]) + 1
        hot = torch.zeros_like(p).scatter_(-1, torch.where(valid[..., 0], index, 0)[..., None], 1.0)
        g = [torch.zeros_like(size) if d is None else d.detach().double().abs()[..., None] for d in (d_logp, d_entropy)]
        lean = (log_p + entropy).abs() + 1
        self.logp = torch.where(valid, 16 * U32 * size, 0).squeeze(-1)
        self.entropy = torch.where(valid, 32 * U32 * size * (1 + entropy), 0).squeeze(-1)
        lost = (g[0] + 100 * g[1]) * 2.0**-125
        self.grad = torch.where(valid, 64 * U32 * size * (g[0] * (p + hot) + g[1] * p * lean) + lost, 0) / temperature + 2.0**-126
