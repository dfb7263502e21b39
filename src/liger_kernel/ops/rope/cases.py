"""Shapes, inputs and the error bound of rope, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.rope import rope
from liger_kernel.ops.rope.ref import eager, reference

# (batch, q heads, k heads, tokens, head_dim, rotary_dim): one, odd head counts, tails of every vector width, partial heads with
# an odd number of copied vectors, vision heads (72, 80), a head wider than the table block of the CPU kernel, model shapes.
SHAPES = [(1, 1, 1, 1, 2, 2), (2, 3, 1, 5, 6, 6), (3, 4, 2, 7, 32, 32), (1, 2, 2, 3, 34, 34), (2, 5, 2, 9, 64, 32), (1, 3, 3, 4, 96, 72),
          (2, 2, 1, 3, 128, 96), (1, 16, 16, 5, 72, 72), (2, 4, 4, 3, 80, 80), (1, 2, 1, 3, 80, 20), (2, 3, 2, 2, 65, 62),
          (1, 2, 1, 3, 1064, 1048), (2, 32, 8, 17, 128, 128), (1, 9, 3, 65, 64, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def angles(batch, tokens, width, device="cpu", base=10000.0, start=0):
    """fp32 angles (batch, tokens, width); sample b starts at position start + 3 b."""
    positions = start + torch.arange(tokens, device=device)[None, :, None] + 3 * torch.arange(batch, device=device)[:, None, None]
    return positions * base ** (-torch.arange(width, device=device) / max(width, 1))


def tables(batch, tokens, rotary_dim, device="cpu", dtype=torch.float32, table="halves"):
    """(cos, sin) of `rotary_dim` columns, or half of them for "shared"."""
    half = angles(batch, tokens, rotary_dim // 2, device)
    full = {"halves": torch.cat((half, half), -1), "pairs": half.repeat_interleave(2, -1), "shared": half}[table]
    return full.cos().to(dtype), full.sin().to(dtype)


def inputs(shape, device, dtype=torch.float32):
    """q, k, dq, dk of (batch, heads, tokens, head_dim) in token-major memory, as projections leave them."""
    batch, q_heads, k_heads, tokens, dim, _ = shape
    torch.manual_seed(0)
    return [torch.randn(batch, tokens, heads, dim, device=device).to(dtype).transpose(1, 2) for heads in (q_heads, k_heads) * 2]


def run(function, q, k, dq, dk, *args, **options):
    """(q', k', gradient of q, gradient of k); q and k keep their strides."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    out = function(q, k, *args, **options)
    torch.autograd.backward(out, (dq, dk))
    return *out, q.grad, k.grad


def bound(q, k, dq, dk, cos, sin, **options):
    """Absolute error of run()'s results before the final rounding: two products and a sum in fp32, 3 u32 (|x1 cos| + |x2 sin|).
    The definition on magnitudes gives that sum for one element of a pair with sin > 0, for the other with sin < 0."""
    q, k, dq, dk, cos, sin = (t.double().abs() for t in (q, k, dq, dk, cos, sin))
    both = zip(run(reference, q, k, dq, dk, cos, sin, **options), run(reference, q, k, dq, dk, cos, -sin, **options), strict=True)
    return [3 * UNIT_ROUNDOFF[torch.float32] * torch.maximum(a.abs(), b.abs()) for a, b in both]


def check(q, k, dq, dk, cos, sin, function=rope, compare_eager=True, **options):
    """`function`'s results and gradients against the definition in fp64, and its error against eager code's."""
    ours = run(function, q, k, dq, dk, cos, sin, **options)
    tensors = q, k, dq, dk, cos, sin
    truth = run(reference, *(t.double() for t in tensors), **options)
    eagerly = run(eager, *tensors) if compare_eager else (None,) * 4
    for name, got, want, limit, plain in zip(("q", "k", "dq", "dk"), ours, truth, bound(*tensors, **options), eagerly, strict=True):
        assert_accurate(got, want, limit, plain, name)
    return ours
