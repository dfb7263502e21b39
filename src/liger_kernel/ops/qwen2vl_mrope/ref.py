"""Qwen2-VL's multimodal rotation in plain PyTorch: the definition channel by channel, and eager code as the model wrote it."""

import torch


def reference_one(x, cos, sin, mrope_section, unsqueeze_dim=1):
    """The definition, for one tensor; run it on fp64 tensors for the truth."""
    half = x.shape[-1] // 2
    t, h, _ = mrope_section
    plane = [0 if j < t else 1 if j < t + h else 2 for j in range(half)] * 2
    columns = range(2 * half)
    cos, sin = (torch.stack([m[p, ..., j] for p, j in zip(plane, columns, strict=True)], -1).unsqueeze(unsqueeze_dim) for m in (cos, sin))
    x1, x2 = x.chunk(2, -1)
    c1, c2 = cos.chunk(2, -1)
    s1, s2 = sin.chunk(2, -1)
    return torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), -1)


def reference(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    return tuple(reference_one(x, cos, sin, mrope_section, unsqueeze_dim) for x in (q, k))


def eager(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """apply_multimodal_rotary_pos_emb of transformers before version 5; results in q's and k's dtype."""
    sections = list(mrope_section) * 2
    cos, sin = (torch.cat([m[i % 3] for i, m in enumerate(t.split(sections, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim) for t in (cos, sin))

    def turn(x):
        x1, x2 = x.chunk(2, -1)
        return (x * cos + torch.cat((-x2, x1), -1) * sin).to(x.dtype)

    return turn(q), turn(k)
