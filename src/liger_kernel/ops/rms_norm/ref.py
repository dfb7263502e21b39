"""RMSNorm in plain PyTorch: the fp64 definition, and eager code as Hugging Face models write it."""

import torch


def reference(x, weight, eps=1e-6, weight_offset=0.0, casting_mode="llama"):
    """The definition; run it on fp64 tensors for the truth. Where a casting mode rounds is not part of it."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight + weight_offset)


def eager(x, weight, eps=1e-6, weight_offset=0.0, casting_mode="llama"):
    """LlamaRMSNorm ("llama"), GemmaRMSNorm and Olmo2RMSNorm ("gemma"), everything in x's dtype ("none")."""
    if casting_mode == "none":
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return normed if weight is None else normed * (weight + weight_offset)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting_mode == "gemma":
        return (normed * (weight.float() + weight_offset)).to(x.dtype)
    return ((weight.float() + weight_offset) * normed.to(x.dtype).float()).to(x.dtype)
