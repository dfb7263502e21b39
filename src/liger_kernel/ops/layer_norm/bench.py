"""Benchmarks of layer_norm; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops import LigerLayerNormFunction
from liger_kernel.ops.layer_norm.ref import eager, fp32

CUDA = [(16384, 4096, torch.bfloat16), (4096, 16384, torch.bfloat16), (1, 4096, torch.bfloat16)]
CPU = [(2048, 4096, torch.float32), (2048, 4096, torch.bfloat16), (1, 4096, torch.float32)]


def case(rows, cols, dtype, device):
    def make():
        x = torch.randn(rows, cols, device=device).to(dtype).requires_grad_()
        w = torch.ones(cols, device=device, dtype=dtype, requires_grad=True)
        return x, w, torch.zeros(cols, device=device, dtype=dtype, requires_grad=True)

    tensor = rows * cols * dtype.itemsize
    return BenchCase(
        name=f"{rows}x{cols} {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={
            "liger": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-6),
            "eager": fp32,
            "torch": eager,
        },
        forward_bytes=2 * tensor,  # x in, y out
        backward_bytes=3 * tensor,  # x and dy in, dx out
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
