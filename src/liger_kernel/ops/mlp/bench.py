"""Benchmarks of mlp; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.mlp import liger_mlp
from liger_kernel.ops.mlp.cases import inputs
from liger_kernel.ops.mlp.ref import eager

# (rows, hidden, intermediate, dtype): Llama-3-8B, Qwen2-0.5B; on the CPU a small model.
CUDA = [(16384, 4096, 14336, torch.bfloat16), (16384, 896, 4864, torch.bfloat16)]
CPU = [(512, 1024, 2816, torch.float32), (512, 1024, 2816, torch.bfloat16)]


def case(rows, hidden, inner, dtype, device, ours=liger_mlp, how=""):
    """`ours` takes what :func:`liger_mlp` does; `how` is added to the name."""
    def make():
        return tuple(t.requires_grad_() for t in inputs((rows,), hidden, inner, dtype, device))

    weights, activations = 3 * inner * hidden * dtype.itemsize, rows * hidden * dtype.itemsize
    return BenchCase(
        name=f"{rows}x{hidden}x{inner}{how} {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={"liger": ours, "eager": eager},
        forward_bytes=weights + 2 * activations,
        backward_bytes=2 * weights + 3 * activations,
        flops=3 * 2 * rows * 3 * inner * hidden,
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
