"""Sparsemax in plain PyTorch, by sorting."""

import torch


def reference(x, dim=-1):
    """The definition (Martins and Astudillo, algorithm 1); run it on fp64 tensors for the truth."""
    z = x - x.amax(dim, keepdim=True)
    ordered = z.sort(dim, descending=True).values
    sums = ordered.cumsum(dim)
    shape = [1] * x.dim()
    shape[dim] = -1
    position = torch.arange(1, x.shape[dim] + 1, device=x.device, dtype=x.dtype).view(shape)
    inside = 1 + position * ordered > sums
    size = inside.sum(dim, keepdim=True).clamp(min=1)
    tau = (sums.gather(dim, size - 1) - 1) / size
    return (z - tau).clamp(min=0)


def eager(x, dim=-1):
    """The same in fp32, the result in x's dtype."""
    return reference(x.float(), dim).to(x.dtype)
