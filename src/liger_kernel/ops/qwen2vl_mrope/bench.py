"""Benchmarks of qwen2vl_mrope; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.qwen2vl_mrope import liger_qwen2vl_mrope
from liger_kernel.ops.qwen2vl_mrope.cases import tables
from liger_kernel.ops.qwen2vl_mrope.ref import eager

# (batch, tokens, q heads, k heads, sections, dtype of everything)
CUDA = [(4, 4096, 28, 4, (16, 24, 24), torch.bfloat16)]
CPU = [(1, 512, 28, 4, (16, 24, 24), torch.float32), (1, 512, 28, 4, (16, 24, 24), torch.bfloat16)]


def case(batch, tokens, q_heads, k_heads, sections, dtype, device):
    dim = 2 * sum(sections)

    def make():
        q, k = (torch.randn(batch, tokens, heads, dim, device=device).to(dtype).transpose(1, 2) for heads in (q_heads, k_heads))
        return q.requires_grad_(), k.requires_grad_(), *tables(batch, tokens, dim // 2, device, dtype), sections

    moved = 2 * batch * tokens * (q_heads + k_heads + 1) * dim * dtype.itemsize  # q and k in and out, cos and sin in
    return BenchCase(
        name=f"B{batch} T{tokens} {q_heads}+{k_heads} heads x {dim} {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={"liger": liger_qwen2vl_mrope, "eager": eager},
        forward_bytes=moved,
        backward_bytes=moved,
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
