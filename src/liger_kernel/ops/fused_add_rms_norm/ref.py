"""Residual addition and RMSNorm in plain PyTorch: the fp64 definition, and eager code as Hugging Face models write it."""

import torch


def reference(x, residual, weight, eps=1e-6, weight_offset=0.0, casting_mode="llama"):
    """The definition, (y, s); run it on fp64 tensors for the truth. Where a casting mode rounds is not part of it."""
    s = x + residual
    normed = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight + weight_offset), s


def eager(x, residual, weight, eps=1e-6, weight_offset=0.0, casting_mode="llama"):
    """`residual + x`, then LlamaRMSNorm ("llama"), GemmaRMSNorm or Olmo2RMSNorm ("gemma"), everything in x's dtype ("none")."""
    s = residual + x
    if casting_mode == "none":
        return reference(x, residual, weight, eps, weight_offset)
    wide = s.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(s.dtype), s
    if casting_mode == "gemma":
        return (normed * (weight.float() + weight_offset)).to(s.dtype), s
    return ((weight.float() + weight_offset) * normed.to(s.dtype).float()).to(s.dtype), s
