"""Shapes, inputs and error bounds of tvd, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.kl_div import REDUCTIONS
from liger_kernel.ops.tvd import liger_tvd
from liger_kernel.ops.tvd.ref import eager, reference

# (rows, V): one element, tails of every width, powers of two and their neighbours, pieces of 4096 and blocks' spans, vocabularies.
SHAPES = [(1, 1), (3, 7), (5, 31), (4, 32), (2, 33), (33, 127), (7, 1000), (3, 1025), (5, 4096), (3, 4104), (2, 33001), (2, 131072),
          (3000, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]


def inputs(shape, device, dtype=torch.float32, target_dtype=None, scale=2.0):
    """Two distributions; some of their elements are equal."""
    torch.manual_seed(0)
    p, q = (torch.softmax(scale * torch.randn(shape, device=device), -1) for _ in range(2))
    p, q = p.to(dtype), q.to(target_dtype or dtype)
    if q.dtype == dtype:
        q = torch.where(torch.rand(shape, device=device) < 0.1, p, q)
    return p, q


def labels_for(rows, device, ignore_index=-100):
    """Every third row is left out."""
    labels = torch.arange(rows, device=device) + 3
    labels[::3] = ignore_index
    return labels


def run(function, p, q, labels=None, upstream=1.0, **options):
    """(loss, gradient); the upstream gradient of an unreduced loss differs from element to element."""
    p = p.detach().requires_grad_()
    loss = function(p, q, labels, **options)
    weights = torch.linspace(1, 2, loss.numel(), device=p.device).view(loss.shape) if loss.dim() else 1.0
    loss.backward(upstream * weights * torch.ones_like(loss))
    return loss, p.grad


def check(p, q, labels=None, compare_eager=False, upstream=1.0, **options):
    """Loss and gradient against the definition in fp64, and their error against eager code's. A term has one rounding of the difference,
    a sum of n terms adds sqrt(n) units of it; the gradient has those of its factor and of the product."""
    reduction = options.get("reduction", "mean")
    loss, grad = run(liger_tvd, p, q, labels, upstream, **options)
    wide = p.double(), q.double()
    truth = run(reference, *wide, labels, upstream, **options)
    plain = run(eager, p, q, labels, upstream, **options) if compare_eager else (None, None)
    assert loss.dtype == torch.float32 and grad.dtype == p.dtype and grad.shape == p.shape
    n = 1 if reduction == "none" else max(p.numel(), 1)
    grad_bound = 8 * U32 * truth[1].abs() + SMALLEST[torch.float32]
    if upstream != 1 and reduction != "none" and p.dtype != torch.float16:  # rounded in forward, then times upstream
        grad_bound = grad_bound + UNIT_ROUNDOFF[p.dtype] * truth[1].abs() + abs(upstream) * SMALLEST[p.dtype]
    assert_accurate(loss, truth[0], (6 + n**0.5) * U32 * truth[0] + SMALLEST[torch.float32], plain[0], "loss")
    assert_accurate(grad, truth[1], grad_bound, plain[1], "gradient")
    return loss, grad


__all__ = ["DTYPES", "REDUCTIONS", "SHAPES", "check", "inputs", "labels_for", "run"]
