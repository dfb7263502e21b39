"""LayerNorm in plain PyTorch: the fp64 definition, and eager code as Hugging Face models write it."""

import torch
import torch.nn.functional as F


def reference(x, weight, bias=None, eps=1e-6, weight_offset=0.0):
    """The definition; run it on fp64 tensors for the truth."""
    centred = x - x.mean(-1, keepdim=True)
    hat = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = hat if weight is None else hat * (weight + weight_offset)
    return y if bias is None else y + bias


def eager(x, weight, bias=None, eps=1e-6, weight_offset=0.0):
    """torch.nn.LayerNorm, which most models use; Nemotron's LayerNorm1P is the same with 1 added to the weight."""
    weight = weight if weight is None or not weight_offset else weight + weight_offset
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def fp32(x, weight, bias=None, eps=1e-6, weight_offset=0.0):
    """CohereLayerNorm: every step in fp32, cast last. It has no bias; here it may."""
    return reference(x.float(), weight if weight is None else weight.float(), bias if bias is None else bias.float(), eps,
                     weight_offset).to(x.dtype)
