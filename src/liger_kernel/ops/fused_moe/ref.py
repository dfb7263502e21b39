"""Mixtures of experts in plain PyTorch: the fp64 definition, and what models run."""

import torch
import torch.nn.functional as F


def eager(x, gate_up_proj, down_proj, index, weights):
    """Expert by expert, as transformers' eager code; an index outside [0, E) is no expert."""
    out = torch.zeros_like(x)
    for e in range(gate_up_proj.shape[0]):
        token, k = torch.where(index == e)
        gate, up = F.linear(x[token], gate_up_proj[e]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down_proj[e]) * weights[token, k, None]
        out = out.index_add(0, token, y.to(out.dtype))
    return out


reference = eager


def grouped(x, gate_up_proj, down_proj, index, weights):
    """With PyTorch's grouped product, transformers' default where it runs. Every index in [0, E)."""
    top_k, experts = index.shape[1], gate_up_proj.shape[0]
    expert, order = index.reshape(-1).sort()
    counts = torch.histc(expert.float() if expert.device.type == "cpu" else expert.int(), experts, 0, experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[order // top_k], gate_up_proj.mT, offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, down_proj.mT, offs=ends) * weights.reshape(-1)[order, None]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return y[place].view(*index.shape, -1).sum(1).to(x.dtype)
