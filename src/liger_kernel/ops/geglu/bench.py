"""Benchmarks of geglu; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.geglu.ref import reference
from liger_kernel.ops.swiglu.bench import CPU, CUDA, named


def case(rows, cols, dtype, device, approximate="tanh"):
    tensor = rows * cols * dtype.itemsize
    return BenchCase(
        name=named(rows, cols, dtype, "" if approximate == "tanh" else " exact"),
        make=lambda: tuple(torch.randn(rows, cols, device=device).to(dtype).requires_grad_() for _ in range(2)),
        contenders={
            "liger": lambda a, b: LigerGELUMulFunction.apply(a, b, approximate),
            "eager": lambda a, b: reference(a, b, approximate),
        },
        forward_bytes=3 * tensor,  # a and b in, c out
        backward_bytes=5 * tensor,  # dc, a and b in, da and db out
    )


def cases(device):
    shapes = CPU if device == "cpu" else CUDA
    return [case(*shape, device) for shape in shapes] + [case(*shapes[0], device, "none")]
