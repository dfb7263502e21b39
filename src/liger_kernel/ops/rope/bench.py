"""Benchmarks of rope; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.rope import liger_rotary_pos_emb
from liger_kernel.ops.rope.cases import tables
from liger_kernel.ops.rope.ref import eager

# (batch, tokens, q heads, k heads, head_dim, rotary_dim, dtype, dtype of cos and sin)
CUDA = [(4, 4096, 32, 8, 128, 128, torch.bfloat16, torch.bfloat16), (4, 4096, 32, 8, 128, 128, torch.bfloat16, torch.float32),
        (4, 4096, 24, 8, 128, 96, torch.bfloat16, torch.bfloat16), (1, 16384, 16, 16, 72, 72, torch.bfloat16, torch.float32),
        (1, 1, 32, 8, 128, 128, torch.bfloat16, torch.bfloat16)]
CPU = [(1, 512, 32, 8, 128, 128, torch.float32, torch.float32), (1, 512, 32, 8, 128, 128, torch.bfloat16, torch.bfloat16),
       (1, 512, 24, 8, 128, 96, torch.bfloat16, torch.bfloat16)]


def case(batch, tokens, q_heads, k_heads, dim, rotary_dim, dtype, table_dtype, device):
    def make():
        # token-major memory, as projections leave it
        q, k = (torch.randn(batch, tokens, heads, dim, device=device).to(dtype).transpose(1, 2) for heads in (q_heads, k_heads))
        return q.requires_grad_(), k.requires_grad_(), *tables(batch, tokens, rotary_dim, device, table_dtype)

    moved = 2 * batch * tokens * (q_heads + k_heads) * dim * dtype.itemsize  # q and k in and out; the table is a hundredth of it
    names = (str(t).removeprefix("torch.") for t in (dtype, table_dtype))
    return BenchCase(
        name="B{} T{} {}+{} heads x {} ({} turned) {}, cos {}".format(batch, tokens, q_heads, k_heads, dim, rotary_dim, *names),
        make=make,
        contenders={"liger": liger_rotary_pos_emb, "eager": eager},
        forward_bytes=moved,
        backward_bytes=moved,
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
