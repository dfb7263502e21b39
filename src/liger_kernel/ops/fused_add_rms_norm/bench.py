"""Benchmarks of fused_add_rms_norm; see core/bench.py."""

import torch
import torch.nn.functional as F

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops import LigerFusedAddRMSNormFunction
from liger_kernel.ops.fused_add_rms_norm.ref import eager

CUDA = [(16384, 4096, torch.bfloat16), (4096, 16384, torch.bfloat16), (1, 4096, torch.bfloat16)]
CPU = [(2048, 4096, torch.float32), (2048, 4096, torch.bfloat16), (1, 4096, torch.float32)]


def torch_op(x, residual, weight):
    s = x + residual
    return F.rms_norm(s, (s.shape[-1],), weight, 1e-6), s


def case(rows, cols, dtype, device):
    def make():
        x, residual = (torch.randn(rows, cols, device=device).to(dtype).requires_grad_() for _ in range(2))
        return x, residual, torch.ones(cols, device=device, dtype=dtype, requires_grad=True)

    tensor = rows * cols * dtype.itemsize
    return BenchCase(
        name=f"{rows}x{cols} {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={
            "liger": lambda x, residual, w: LigerFusedAddRMSNormFunction.apply(x, residual, w, 1e-6, 0.0, "llama", False),
            "eager": eager,
            "torch": torch_op,
        },
        forward_bytes=4 * tensor,  # x and residual in, s and y out
        backward_bytes=4 * tensor,  # s, dy and ds in, one gradient out
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
