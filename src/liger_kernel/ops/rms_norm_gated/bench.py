"""Benchmarks of rms_norm_gated; see core/bench.py. Qwen3-Next's heads of 128 (its rows are tokens x heads), and Mamba-2's 8192 columns
in one group and in eight."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.rms_norm_gated import LigerRMSNormGatedFunction
from liger_kernel.ops.rms_norm_gated.ref import eager

# rows, columns, dtype, norm before gate, group size
CUDA = [(524288, 128, torch.bfloat16, True, None), (16384, 8192, torch.bfloat16, False, None), (16384, 8192, torch.bfloat16, False, 1024),
        (32, 128, torch.bfloat16, True, None)]
CPU = [(65536, 128, torch.float32, True, None), (65536, 128, torch.bfloat16, True, None), (1024, 8192, torch.float32, False, None),
       (1024, 8192, torch.bfloat16, False, None), (1024, 8192, torch.bfloat16, False, 1024), (32, 128, torch.float32, True, None)]


def case(rows, cols, dtype, norm_before_gate, group_size, device):
    def make():
        x, gate = (torch.randn(rows, cols, device=device).to(dtype).requires_grad_() for _ in range(2))
        return x, gate, torch.ones(cols, device=device, dtype=dtype, requires_grad=True)

    tensor, options = rows * cols * dtype.itemsize, (1e-6, norm_before_gate, group_size)
    order = "norm, gate" if norm_before_gate else "gate, norm"
    return BenchCase(
        name=f"{rows}x{cols} {str(dtype).removeprefix('torch.')} {order}" + (f" of {group_size}" if group_size else ""),
        make=make,
        contenders={
            "liger": lambda x, gate, w: LigerRMSNormGatedFunction.apply(x, gate, w, *options),
            "eager": lambda x, gate, w: eager(x, gate, w, *options),
        },
        forward_bytes=3 * tensor,  # x and gate in, y out
        backward_bytes=5 * tensor,  # dy, x and gate in, dx and dgate out
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
