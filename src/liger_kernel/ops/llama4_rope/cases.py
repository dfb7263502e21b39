"""Shapes, inputs and the error bound of llama4_rope, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF, assert_accurate
from liger_kernel.ops.llama4_rope import liger_llama4_text_rotary_pos_emb
from liger_kernel.ops.llama4_rope.ref import eager, reference

# (batch, tokens, q heads, k heads, head_dim): one, odd head counts, tails of every vector width, Llama-4's text and vision heads.
SHAPES = [(1, 1, 1, 1, 2), (2, 5, 3, 1, 6), (3, 7, 4, 2, 32), (1, 3, 2, 2, 34), (2, 3, 5, 2, 62), (1, 5, 16, 16, 88), (2, 17, 40, 8, 128),
          (1, 2, 2, 1, 1064)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def frequencies(batch, tokens, pairs, device="cpu", base=10000.0):
    """complex64 (batch, tokens, pairs) of unit size; sample b starts at position 3 b."""
    positions = torch.arange(tokens, device=device)[None, :, None] + 3 * torch.arange(batch, device=device)[:, None, None]
    angles = positions * base ** (-torch.arange(pairs, device=device) / pairs)
    return torch.polar(torch.ones_like(angles), angles)


def inputs(shape, device, dtype=torch.float32):
    """q, k, dq, dk of (batch, tokens, heads, head_dim)."""
    batch, tokens, q_heads, k_heads, dim = shape
    torch.manual_seed(0)
    return [torch.randn(batch, tokens, heads, dim, device=device).to(dtype) for heads in (q_heads, k_heads) * 2]


def run(function, q, k, dq, dk, *args):
    """(q', k', gradient of q, gradient of k)."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    out = function(q, k, *args)
    torch.autograd.backward(out, (dq, dk))
    return *out, q.grad, k.grad


def bound(tensors, freqs_cis):
    """Absolute error before the final rounding: two products and a sum in fp32, 3 u32 |x| |turn|, |x| over both channels of a pair."""
    def size(x):
        return x.double().unflatten(-1, (-1, 2)).abs().sum(-1, keepdim=True).expand(*x.shape[:-1], -1, 2).flatten(-2)

    turn = freqs_cis.abs().double().repeat_interleave(2, -1).unsqueeze(2)
    return [3 * UNIT_ROUNDOFF[torch.float32] * size(x) * turn for x in tensors]


def check(q, k, dq, dk, freqs_cis, function=liger_llama4_text_rotary_pos_emb):
    """Results and gradients against the definition in fp64, and their error against eager code's."""
    ours = run(function, q, k, dq, dk, freqs_cis)
    eagerly = run(eager, q, k, dq, dk, freqs_cis)
    truth = run(reference, *(t.double() for t in (q, k, dq, dk)), freqs_cis.to(torch.complex128))
    for name, got, want, limit, plain in zip(("q", "k", "dq", "dk"), ours, truth, bound((q, k, dq, dk), freqs_cis), eagerly, strict=True):
        assert_accurate(got, want, limit, plain, name)
    return ours
