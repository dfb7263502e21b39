"""Shapes and error bounds of fused_moe, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

# (tokens, hidden, intermediate, experts, experts per token): single elements, tails of every width, powers of two and their neighbours,
# more experts than tokens.
SHAPES = [(1, 1, 1, 1, 1), (3, 7, 5, 2, 1), (37, 24, 20, 5, 2), (64, 64, 32, 8, 8), (130, 33, 65, 4, 3), (257, 128, 63, 16, 4),
          (5, 1024, 96, 32, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(tokens, hidden, intermediate, experts, top_k, dtype=torch.float32, device="cpu", seed=0, none=True):
    """(x, gate_up_proj, down_proj, index, weights); with `none`, some choices are no expert."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)

    choices = experts + (1 if none and top_k <= experts and tokens > 1 else 0)
    index = torch.rand(tokens, choices, generator=generator).argsort(1)[:, :top_k].contiguous().to(device)
    weights = torch.rand(tokens, top_k, generator=generator).to(dtype).to(device)
    return (normal(tokens, hidden), normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
            normal(experts, hidden, intermediate, scale=intermediate**-0.5), index, weights)


def bounds(x, gate_up, down, index, weights, dout, dtype):
    """Absolute errors of (out, dx, d gate_up, d down, d weights) before their final rounding, from fp64 operands.

    Every product is a sum in fp32, whose n terms are off by n u32 of the sum of their sizes, rounded to the dtype; what it does to the
    next is followed with |silu'| <= 1.1 and |silu''| <= 0.5.
    """
    u, u32, least = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[torch.float32], SMALLEST[dtype]
    (tokens, hidden), (experts, double, _), top_k = x.shape, gate_up.shape, index.shape[1]
    token, slots = torch.arange(tokens * top_k, device=x.device) // top_k, tokens * top_k
    expert = index.reshape(-1)
    real = ((expert >= 0) & (expert < experts)).double()[:, None]
    expert = torch.where(real[:, 0] > 0, expert, 0)
    weight = weights.reshape(-1, 1) * real
    size = weight.abs()

    def apply(m, v):  # [slots, rows, columns] of the slots' experts, [slots, columns]
        return torch.einsum("src,sc->sr", m[expert], v)

    def add(v):  # over each token's slots
        return torch.zeros(tokens, v.shape[1], dtype=v.dtype, device=v.device).index_add(0, token, v * real)

    def outer(a, b):  # over each expert's slots
        one = torch.nn.functional.one_hot(expert, experts).to(a.dtype) * real
        return torch.einsum("se,sm,sn->emn", one, a, b)

    def product(m, v, dv, terms):  # value, size and error of m v, of v with error dv
        total = apply(m.abs(), v.abs())
        value = apply(m, v)
        return value, apply(m.abs(), dv) + terms * u32 * total + u * (value.abs() + terms * u32 * total) + least

    xs, dy = x[token], dout[token]
    h, dh = product(gate_up, xs, torch.zeros_like(xs), hidden + 8)
    gate, up = h.chunk(2, -1)
    d_gate, d_up = dh.chunk(2, -1)
    s = torch.sigmoid(gate)
    silu, slope = gate * s, s * (1 + gate * (1 - s))
    d_silu = 1.1 * d_gate + (16 + 2 * gate.abs()) * u32 * silu.abs() + least
    a = silu * up
    d_a = d_silu * (up.abs() + d_up) + silu.abs() * d_up + 2.1 * u * a.abs() + least
    y, d_y = product(down, a, d_a, double // 2 + 8)
    out = add(size * d_y) + (top_k + 2) * u32 * add(size * y.abs())

    da, d_da = product(down.mT, dy, torch.zeros_like(dy), hidden + 8)
    d_weights = real * (d_da * (a.abs() + d_a) + da.abs() * d_a + (double + 8) * u32 * da.abs() * a.abs()).sum(1, keepdim=True)
    d_slope = 0.5 * d_gate + 32 * u32
    grad = torch.cat([weight * da * up * slope, weight * da * silu], -1)
    error = 4 * u * grad.abs() + least + torch.cat([
        size * (d_da * (up * slope).abs() + da.abs() * (d_up * slope.abs() + (up.abs() + d_up) * d_slope)),
        size * (d_da * silu.abs() + (da.abs() + d_da) * d_silu),
    ], -1)
    per_slot, d_per_slot = product(gate_up.mT, grad, error, double + 8)
    dx = add(d_per_slot) + (top_k + 2) * u32 * add(per_slot.abs())
    d_gate_up = outer(error, xs.abs()) + (slots + 8) * u32 * outer(grad.abs(), xs.abs())
    d_weighted = size * d_a + 1.1 * u * size * a.abs() + least
    d_down = outer(dy.abs(), d_weighted) + (slots + 8) * u32 * outer(dy.abs(), size * a.abs())
    return out, dx, d_gate_up, d_down, d_weights.view(index.shape)
