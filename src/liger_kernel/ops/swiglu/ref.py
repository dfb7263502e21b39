"""SwiGLU in plain PyTorch: the fp64 definition, and eager code as Hugging Face models write it."""

import torch.nn.functional as F


def reference(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    """The definition; run it on fp64 tensors for the truth. Where types are rounded is not part of it."""
    return F.silu(a * gate_multiplier) * b * down_multiplier


def eager(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    """LlamaMLP's product; with multipliers FalconH1MLP's, whose down multiplier follows the product."""
    gate = a if gate_multiplier == 1.0 else a * gate_multiplier
    c = F.silu(gate) * b
    return c if down_multiplier == 1.0 else c * down_multiplier


def packed(y):
    """Phi3MLP's product of the two halves."""
    gate, up = y.chunk(2, dim=-1)
    return up * F.silu(gate)
