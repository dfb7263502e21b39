"""Benchmarks of poly_norm; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.poly_norm import liger_poly_norm
from liger_kernel.ops.poly_norm.cases import inputs
from liger_kernel.ops.poly_norm.ref import eager

CUDA = [(16384, 4096, torch.bfloat16), (4096, 14336, torch.bfloat16), (4096, 4096, torch.float32), (1, 4096, torch.bfloat16)]
CPU = [(2048, 4096, torch.float32), (2048, 4096, torch.bfloat16), (1, 4096, torch.float32)]


def case(rows, cols, dtype, device):
    tensor = rows * cols * dtype.itemsize

    def make():
        x, weight, bias, _ = inputs((rows, cols), device, dtype, torch.float32)
        return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()

    return BenchCase(
        name=f"{rows}x{cols} {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={"liger": liger_poly_norm, "eager": eager},
        forward_bytes=2 * tensor,  # x in, y out
        backward_bytes=3 * tensor,  # dy and x in, dx out
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
