"""Benchmarks of softmax; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.softmax import liger_softmax
from liger_kernel.ops.softmax.cases import inputs
from liger_kernel.ops.softmax.ref import eager

CUDA = [(65536, 1024, torch.bfloat16), (16384, 4096, torch.bfloat16), (16384, 32768, torch.bfloat16), (8192, 50257, torch.bfloat16),
        (8192, 128256, torch.bfloat16), (4096, 131072, torch.float32), (512, 1048576, torch.bfloat16), (1, 128256, torch.float32)]
CPU = [(2048, 4096, torch.float32), (2048, 4096, torch.bfloat16), (64, 128256, torch.bfloat16)]


def case(rows, cols, dtype, device):
    tensor = rows * cols * dtype.itemsize
    return BenchCase(
        name=f"{rows}x{cols} {str(dtype).removeprefix('torch.')}",
        make=lambda: (inputs((rows, cols), device, dtype)[0].requires_grad_(),),
        contenders={"liger": liger_softmax, "eager": eager, "torch": lambda x: torch.softmax(x, -1)},
        forward_bytes=2 * tensor,  # x in, y out
        backward_bytes=3 * tensor,  # dy and y in, dx out
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
