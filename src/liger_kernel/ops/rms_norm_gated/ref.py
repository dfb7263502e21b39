"""Gated RMSNorm in plain PyTorch: the fp64 definition, and eager code as Hugging Face models write it."""

import torch

ACTIVATIONS = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}
# Formed so that the slope of a saturated sigmoid is not lost to 1 - 1.
EXACT = {"silu": lambda z: z / (1 + torch.exp(-z)), "sigmoid": lambda z: 1 / (1 + torch.exp(-z))}


def _normalise(h, eps, group_size):
    groups = h.unflatten(-1, (-1, group_size)) if group_size and h.shape[-1] else h
    return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(h.shape)


def reference(x, gate, weight, eps=1e-6, norm_before_gate=True, group_size=None, activation="silu", casting_mode="llama"):
    """The definition; run it on fp64 tensors for the truth. Where a casting mode rounds is not part of it."""
    a = 1 if gate is None else EXACT[activation](gate)
    w = 1 if weight is None else weight
    return _normalise(x, eps, group_size) * w * a if norm_before_gate else _normalise(x * a, eps, group_size) * w


def eager(x, gate, weight, eps=1e-6, norm_before_gate=True, group_size=None, activation="silu", casting_mode="llama"):
    """Qwen3NextRMSNormGated (norm before gate, "llama"), KimiLinearRMSNormGated (norm before gate, "gemma"), MambaRMSNormGated (gate
    before norm, "llama"), FalconH1RMSNormGated ("gemma"). Where a weight in fp32 widens their result, this one is still in x's dtype."""
    a = 1 if gate is None else ACTIVATIONS[activation](gate.float())
    h = x.float() if norm_before_gate else x.float() * a
    hat = _normalise(h, eps, group_size)
    if casting_mode == "llama":
        hat = hat.to(x.dtype)
    y = hat if weight is None else weight * hat
    return (y * a if norm_before_gate else y).to(x.dtype)
