"""Llama-4's rotation in plain PyTorch: the definition by complex products, and eager code as the Hugging Face model writes it."""

import torch


def _complex(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def reference(q, k, freqs_cis):
    """q, k (batch, tokens, heads, head_dim) and freqs_cis (1 or batch, tokens, head_dim / 2); run it on fp64 and complex128."""
    turns = freqs_cis.unsqueeze(2)
    return tuple(torch.view_as_real(_complex(x) * turns).flatten(-2) for x in (q, k))


def eager(q, k, freqs_cis):
    """Llama4TextAttention's apply_rotary_emb: fp32 complex products, cast back."""
    turns = freqs_cis[:, :, None, :]
    return tuple(torch.view_as_real(_complex(x.float()) * turns).flatten(3).type_as(x) for x in (q, k))
