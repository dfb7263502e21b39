"""Benchmarks of swiglu; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction
from liger_kernel.ops.swiglu.ref import eager, packed

CUDA = [(16384, 14336, torch.bfloat16), (4096, 14336, torch.float32), (1, 14336, torch.bfloat16)]
CPU = [(2048, 5632, torch.float32), (2048, 5632, torch.bfloat16), (1, 5632, torch.float32)]


def named(rows, cols, dtype, suffix=""):
    return f"{rows}x{cols} {str(dtype).removeprefix('torch.')}{suffix}"


def case(rows, cols, dtype, device):
    tensor = rows * cols * dtype.itemsize
    return BenchCase(
        name=named(rows, cols, dtype),
        make=lambda: tuple(torch.randn(rows, cols, device=device).to(dtype).requires_grad_() for _ in range(2)),
        contenders={"liger": LigerSiLUMulFunction.apply, "eager": eager},
        forward_bytes=3 * tensor,  # a and b in, c out
        backward_bytes=5 * tensor,  # dc, a and b in, da and db out
    )


def packed_case(rows, cols, dtype, device):
    tensor = rows * cols * dtype.itemsize
    return BenchCase(
        name=named(rows, cols, dtype, " packed"),
        make=lambda: (torch.randn(rows, 2 * cols, device=device).to(dtype).requires_grad_(),),
        contenders={"liger": LigerFusedGateUpSiLUMulFunction.apply, "eager": packed},
        forward_bytes=3 * tensor,
        backward_bytes=5 * tensor,
    )


def cases(device):
    shapes = CPU if device == "cpu" else CUDA
    return [case(*shape, device) for shape in shapes] + [packed_case(*shapes[0], device)]
