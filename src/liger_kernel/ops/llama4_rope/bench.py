"""Benchmarks of llama4_rope; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.llama4_rope import liger_llama4_text_rotary_pos_emb
from liger_kernel.ops.llama4_rope.cases import frequencies
from liger_kernel.ops.llama4_rope.ref import eager

# (batch, tokens, q heads, k heads, head_dim, dtype)
CUDA = [(4, 4096, 40, 8, 128, torch.bfloat16), (8, 577, 16, 16, 88, torch.bfloat16)]
CPU = [(1, 512, 40, 8, 128, torch.float32), (1, 512, 40, 8, 128, torch.bfloat16)]


def case(batch, tokens, q_heads, k_heads, dim, dtype, device):
    def make():
        q, k = (torch.randn(batch, tokens, heads, dim, device=device).to(dtype) for heads in (q_heads, k_heads))
        return q.requires_grad_(), k.requires_grad_(), frequencies(1, tokens, dim // 2, device)

    moved = 2 * batch * tokens * (q_heads + k_heads) * dim * dtype.itemsize  # q and k in and out; the table is a hundredth of it
    return BenchCase(
        name=f"B{batch} T{tokens} {q_heads}+{k_heads} heads x {dim} {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={"liger": liger_llama4_text_rotary_pos_emb, "eager": eager},
        forward_bytes=moved,
        backward_bytes=moved,
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
