"""Shapes, inputs and error bounds of kl_div, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.kl_div import REDUCTIONS, liger_kl_div
from liger_kernel.ops.kl_div.ref import eager, reference

# (rows, V): one element, tails of every width, powers of two and their neighbours, pieces of 4096 and blocks' spans, vocabularies.
SHAPES = [(1, 1), (3, 7), (5, 31), (4, 32), (2, 33), (33, 127), (7, 1000), (3, 1025), (5, 4096), (3, 4104), (2, 33001), (2, 131072),
          (3000, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]


def inputs(shape, device, dtype=torch.float32, target_dtype=None, log_target=False, scale=2.0):
    """Log-probabilities, and probabilities or their logarithms."""
    torch.manual_seed(0)
    x, y = (torch.log_softmax(scale * torch.randn(shape, device=device), -1) for _ in range(2))
    return x.to(dtype), (y if log_target else y.exp()).to(target_dtype or dtype)


def run(function, x, y, upstream=1.0, **options):
    """(loss, gradient); the upstream gradient of element i of an unreduced loss is upstream times i / size + 1."""
    x = x.detach().requires_grad_()
    loss = function(x, y, **options)
    weights = torch.linspace(1, 2, loss.numel(), device=x.device).view(loss.shape) if loss.dim() else 1.0
    loss.backward(upstream * weights * torch.ones_like(loss))
    return loss, x.grad


def bounds(x, y, reduction, log_target, eps, upstream):
    """Absolute errors of (loss, gradient) before their final rounding, from fp64 tensors. A term has 3 units of its two parts, and one of
    p's exponential for each unit of |y|; the hardware logarithm of 16-bit operands is absolutely within 2 units of 1. Sums add n terms
    with sqrt(n) units of their sizes."""
    p = y.exp() if log_target else y.abs()
    own = y if log_target else y.clamp(min=eps).log()
    finite = torch.where(p == 0, torch.zeros_like(x), p * (own.abs() + x.abs() + 1))
    wide = 3 + (2 * y.abs() if log_target else 0)
    terms = U32 * (4 + wide) * finite
    n = max(x.numel(), 1)
    factor = {"mean": 1 / n, "batchmean": 1 / max(x.shape[0], 1)}.get(reduction, 1.0)
    loss = terms if reduction == "none" else factor * (terms.sum() + n**0.5 * U32 * finite.sum())
    return loss + SMALLEST[torch.float32], 2 * abs(upstream) * factor * U32 * (6 + wide) * p + SMALLEST[torch.float32]


def check(x, y, compare_eager=False, upstream=1.0, **options):
    """Loss and gradient against the definition in fp64, and their error against torch's."""
    reduction, log_target, eps = options.get("reduction", "mean"), options.get("log_target", False), options.get("eps", 1e-10)
    loss, grad = run(liger_kl_div, x, y, upstream, **options)
    wide = x.double(), y.double()
    truth = run(reference, *wide, upstream, **options)
    plain = run(eager, x, y, upstream, **options) if compare_eager else (None, None)
    assert loss.dtype == torch.float32 and grad.dtype == x.dtype and grad.shape == x.shape
    loss_bound, grad_bound = bounds(*wide, reduction, log_target, eps, upstream)
    if upstream != 1 and reduction != "none" and x.dtype != torch.float16:  # rounded in forward, then times upstream
        grad_bound = grad_bound + UNIT_ROUNDOFF[x.dtype] * truth[1].abs() + abs(upstream) * SMALLEST[x.dtype]
    assert_accurate(loss, truth[0], loss_bound, plain[0], "loss")
    assert_accurate(grad, truth[1], grad_bound, plain[1], "gradient")
    return loss, grad


__all__ = ["DTYPES", "REDUCTIONS", "SHAPES", "bounds", "check", "inputs", "run"]
