"""Benchmarks of dyt; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.dyt import liger_dyt
from liger_kernel.ops.dyt.cases import inputs
from liger_kernel.ops.dyt.ref import eager

CUDA = [(16384, 4096, torch.bfloat16), (65536, 768, torch.bfloat16), (4096, 4096, torch.float32), (1, 4096, torch.bfloat16)]
CPU = [(2048, 4096, torch.float32), (2048, 4096, torch.bfloat16), (1, 4096, torch.float32)]


def case(rows, cols, dtype, device):
    tensor = rows * cols * dtype.itemsize

    def make():
        return tuple(t.requires_grad_() for t in inputs((rows, cols), device, dtype)[:4])

    return BenchCase(
        name=f"{rows}x{cols} {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={"liger": liger_dyt, "eager": eager},
        forward_bytes=2 * tensor,  # x in, y out
        backward_bytes=3 * tensor,  # dy and x in, dx out
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
