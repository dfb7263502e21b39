"""Shapes, inputs and the error bound of qwen2vl_mrope, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.qwen2vl_mrope import liger_qwen2vl_mrope
from liger_kernel.ops.qwen2vl_mrope.ref import eager, reference

# (batch, q heads, k heads, tokens, sections): one section empty, sections of no vector's width, Qwen2-VL's.
SHAPES = [(1, 1, 1, 1, (1, 0, 0)), (2, 3, 1, 5, (1, 1, 1)), (3, 4, 2, 7, (4, 6, 6)), (1, 2, 2, 3, (5, 7, 19)), (2, 2, 1, 4, (0, 8, 8)),
          (2, 28, 4, 17, (16, 24, 24))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tables(batch, tokens, half, device="cpu", dtype=torch.float32):
    """(cos, sin) of (3, batch, tokens, 2 half): planes, samples and tokens have positions of their own."""
    torch.manual_seed(1)
    positions = torch.randint(0, 500, (3, batch, tokens, 1), device=device)
    angles = positions * 10000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def inputs(shape, device, dtype=torch.float32):
    """q, k, dq, dk of (batch, heads, tokens, head_dim) in token-major memory, as projections leave them."""
    batch, q_heads, k_heads, tokens, sections = shape
    dim = 2 * sum(sections)
    torch.manual_seed(0)
    return [torch.randn(batch, tokens, heads, dim, device=device).to(dtype).transpose(1, 2) for heads in (q_heads, k_heads) * 2]


def run(function, q, k, dq, dk, *args, **options):
    """(q', k', gradient of q, gradient of k)."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    out = function(q, k, *args, **options)
    torch.autograd.backward(out, (dq, dk))
    return *out, q.grad, k.grad


def bound(q, k, dq, dk, cos, sin, *options):
    """Absolute error before the final rounding, as of rope: 3 u32 (|x1 cos| + |x2 sin|); the definition on magnitudes gives that sum
    for one channel of a pair with sin > 0, for the other with sin < 0."""
    q, k, dq, dk, cos, sin = (t.double().abs() for t in (q, k, dq, dk, cos, sin))
    both = zip(run(reference, q, k, dq, dk, cos, sin, *options), run(reference, q, k, dq, dk, cos, -sin, *options), strict=True)
    return [3 * UNIT_ROUNDOFF[torch.float32] * torch.maximum(a.abs(), b.abs()) for a, b in both]


def check(q, k, dq, dk, cos, sin, *options, function=liger_qwen2vl_mrope):
    """Results and gradients against the definition in fp64, and their error against eager code's."""
    tensors = q, k, dq, dk, cos, sin
    ours, eagerly = run(function, *tensors, *options), run(eager, *tensors, *options)
    truth = run(reference, *(t.double() for t in tensors), *options)
    for name, got, want, limit, plain in zip(("q", "k", "dq", "dk"), ours, truth, bound(*tensors, *options), eagerly, strict=True):
        assert_accurate(got, want, limit, plain, name)
    return ours
