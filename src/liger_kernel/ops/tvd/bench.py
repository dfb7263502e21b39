"""Benchmarks of tvd; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.tvd import liger_tvd
from liger_kernel.ops.tvd.cases import inputs
from liger_kernel.ops.tvd.ref import eager

CUDA = [(8192, 32768, torch.bfloat16), (8192, 128256, torch.bfloat16), (4096, 131072, torch.float32), (4096, 50257, torch.bfloat16)]
CPU = [(256, 32000, torch.float32), (256, 32000, torch.bfloat16)]


def case(rows, cols, dtype, device):
    tensor = rows * cols * dtype.itemsize

    def make():
        p, q = inputs((rows, cols), device, dtype)
        return p.requires_grad_(), q

    return BenchCase(
        name=f"{rows}x{cols} {str(dtype).removeprefix('torch.')} batchmean",
        make=make,
        contenders={"liger": lambda p, q: liger_tvd(p, q, reduction="batchmean"),
                    "eager": lambda p, q: eager(p, q, reduction="batchmean")},
        forward_bytes=2 * tensor,  # both operands in
        backward_bytes=tensor,  # the gradient out, written in forward
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
