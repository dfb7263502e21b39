"""Shapes and error bounds of mlp, for its tests and for `liger numerics`."""

import torch

from liger_kernel.ops.fused_moe.cases import bounds as of_experts

# (leading shape, hidden, intermediate): single elements, tails of every width, powers of two and their neighbours, no rows.
SHAPES = [((1,), 1, 1), ((3,), 7, 5), ((2, 5), 24, 20), ((64,), 64, 32), ((2, 3, 11), 33, 65), ((257,), 128, 63), ((5,), 1024, 96),
          ((0,), 16, 24), ((2, 0), 16, 24)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(leading, hidden, inner, dtype=torch.float32, device="cpu", seed=0, scale=1.0):
    """(input, gate weight, up weight, down weight)"""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)

    return (normal(*leading, hidden, scale=scale), normal(inner, hidden, scale=hidden**-0.5), normal(inner, hidden, scale=hidden**-0.5),
            normal(hidden, inner, scale=inner**-0.5))


def bounds(x, gate, up, down, dy, dtype, gate_multiplier=1.0, down_multiplier=1.0):
    """Absolute errors of (y, dx, d gate, d up, d down) before their final rounding, from fp64 operands: those of fused_moe with one
    expert, whose weight takes the down multiplier and whose gate weight the gate's."""
    rows, index = x.reshape(-1, x.shape[-1]), torch.zeros(x.shape[:-1].numel(), 1, dtype=torch.long, device=x.device)
    weight = torch.full(index.shape, down_multiplier, dtype=x.dtype, device=x.device)
    stacked = torch.cat([gate * gate_multiplier, up])[None]
    out, dx, d_stacked, d_down, _ = of_experts(rows, stacked, down[None], index, weight, dy.reshape(rows.shape), dtype)
    d_gate, d_up = d_stacked[0].chunk(2)
    return out.view_as(x), dx.view_as(x), d_gate * gate_multiplier, d_up, d_down[0]
