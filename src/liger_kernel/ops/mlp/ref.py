"""The SwiGLU feed-forward layer in plain PyTorch: the fp64 definition, and eager code as Hugging Face models write it."""

import torch.nn.functional as F


def eager(x, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
    """LlamaMLP; with multipliers FalconH1MLP."""
    gate = F.linear(x, gate_weight)
    gate = gate if gate_multiplier == 1.0 else gate * gate_multiplier
    y = F.linear(F.silu(gate) * F.linear(x, up_weight), down_weight)
    return y if down_multiplier == 1.0 else y * down_multiplier


reference = eager
