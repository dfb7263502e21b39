"""Benchmarks of relu_squared; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.relu_squared import liger_relu_squared
from liger_kernel.ops.relu_squared.ref import eager

CUDA = [(16384, 16384, torch.bfloat16), (4096, 16384, torch.float32), (1, 16384, torch.bfloat16)]
CPU = [(2048, 5632, torch.float32), (2048, 5632, torch.bfloat16), (1, 5632, torch.float32)]


def case(rows, cols, dtype, device):
    tensor = rows * cols * dtype.itemsize
    return BenchCase(
        name=f"{rows}x{cols} {str(dtype).removeprefix('torch.')}",
        make=lambda: (torch.randn(rows, cols, device=device).to(dtype).requires_grad_(),),
        contenders={"liger": liger_relu_squared, "eager": eager},
        forward_bytes=2 * tensor,  # x in, y out
        backward_bytes=3 * tensor,  # dy and x in, dx out
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
