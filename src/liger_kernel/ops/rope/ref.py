"""RoPE in plain PyTorch: the definition by pairs, and eager code as Hugging Face models write it."""

import torch


def _pairs(x, order):
    return (x[..., ::2], x[..., 1::2]) if order == "pairs" else x.chunk(2, -1)


def _join(x1, x2, order):
    return torch.stack((x1, x2), -1).flatten(-2) if order == "pairs" else torch.cat((x1, x2), -1)


def reference_one(x, cos, sin, unsqueeze_dim=1, rotary_dim=None, channels="halves", table=None):
    """The definition, for one tensor; run it on fp64 tensors for the truth."""
    width = cos.shape[-1]
    r = min(width, x.shape[-1]) if rotary_dim is None else rotary_dim
    table = table or ("shared" if width != r else "pairs" if channels == "pairs" else "halves")
    cos, sin = (t.unsqueeze(0) if t.dim() == 2 else t for t in (cos, sin))
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    if table == "shared":
        (c1, c2), (s1, s2) = ((t[..., : r // 2],) * 2 for t in (cos, sin))
    else:
        (c1, c2), (s1, s2) = _pairs(cos[..., :r], table), _pairs(sin[..., :r], table)
    x1, x2 = _pairs(x[..., :r], "halves" if channels == "halves" else "pairs")
    turned = _join(x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, "pairs" if channels == "pairs" else "halves")
    return torch.cat((turned, x[..., r:]), -1)


def reference(q, k, cos, sin, **options):
    return reference_one(q, cos, sin, **options), reference_one(k, cos, sin, **options)


def rotate_half(x):
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def eager(q, k, cos, sin, unsqueeze_dim=1):
    """LlamaModel's and Phi3's apply_rotary_pos_emb; results in q's and k's dtype."""
    cos, sin = (t.unsqueeze(0) if t.dim() == 2 else t for t in (cos, sin))
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    r = cos.shape[-1]

    def turn(x):
        turned, rest = x[..., :r], x[..., r:]
        turned = (turned * cos + rotate_half(turned) * sin).to(x.dtype)
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    return turn(q), turn(k)


def eager_complex(x, cos, sin):
    """Pairs (2i, 2i + 1) of x (batch, heads, tokens, D) as complex numbers, times cos + i sin (batch, tokens, D/2)."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)
