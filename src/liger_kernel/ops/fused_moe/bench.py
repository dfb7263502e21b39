"""Benchmarks of fused_moe; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.fused_moe import liger_fused_moe
from liger_kernel.ops.fused_moe.cases import inputs
from liger_kernel.ops.fused_moe.ref import eager, grouped

# (tokens, hidden, intermediate, experts, experts per token, dtype): Mixtral 8x7B, Qwen3-30B-A3B; on the CPU a quarter of the first.
CUDA = [(8192, 4096, 14336, 8, 2, torch.bfloat16), (16384, 2048, 768, 128, 8, torch.bfloat16), (1, 4096, 14336, 8, 2, torch.bfloat16)]
CPU = [(512, 1024, 2048, 8, 2, torch.float32), (512, 1024, 2048, 8, 2, torch.bfloat16), (512, 512, 192, 64, 8, torch.float32)]


def case(tokens, hidden, inner, experts, top_k, dtype, device):
    def make():
        given = inputs(tokens, hidden, inner, experts, top_k, dtype, device, none=False)
        return tuple(t.requires_grad_() if t.is_floating_point() else t for t in given)

    projections, rows = 3 * experts * inner * hidden * dtype.itemsize, tokens * hidden * dtype.itemsize
    return BenchCase(
        name=f"{tokens}x{hidden}x{inner}, {top_k} of {experts} {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={"liger": liger_fused_moe, "eager": eager, "torch": grouped},
        forward_bytes=projections + 2 * rows,
        backward_bytes=2 * projections + 3 * rows,
        flops=3 * 2 * tokens * top_k * 3 * inner * hidden,
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
