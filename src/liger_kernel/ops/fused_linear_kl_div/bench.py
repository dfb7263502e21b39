"""Benchmarks of fused_linear_kl_div; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.fused_linear_kl_div import liger_fused_linear_kl_div
from liger_kernel.ops.fused_linear_kl_div.cases import flops, memory
from liger_kernel.ops.fused_linear_kl_div.ref import eager

CUDA = [(4096, 4096, 128256, torch.bfloat16), (4096, 4096, 32000, torch.bfloat16)]
CPU = [(256, 896, 151936, torch.float32), (1024, 1024, 32000, torch.bfloat16)]


def case(rows, hidden, vocab, dtype, device):
    def make():
        x = torch.randn(rows, hidden, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(vocab, hidden, device=device) * 0.02).to(dtype).requires_grad_()
        return x, weight, torch.softmax(torch.randn(rows, vocab, device=device), -1).to(dtype)

    moved = memory(rows, hidden, vocab, dtype)
    return BenchCase(name=f"{rows}x{hidden}x{vocab} {str(dtype).removeprefix('torch.')}", make=make,
                     contenders={"liger": liger_fused_linear_kl_div, "eager": eager}, forward_bytes=moved, backward_bytes=moved // 3,
                     flops=flops(rows, hidden, vocab))


def cases(device):
    return [case(*shape, device) for shape in (CPU if torch.device(device).type == "cpu" else CUDA)]
