"""Benchmarks of group_norm; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.group_norm import liger_group_norm
from liger_kernel.ops.group_norm.cases import EPS, inputs
from liger_kernel.ops.group_norm.ref import eager

# (shape, groups, dtype): layers of a diffusion U-Net
CUDA = [((16, 320, 64, 64), 32, torch.bfloat16), ((16, 1280, 16, 16), 32, torch.bfloat16), ((8, 128, 256, 256), 32, torch.float32)]
CPU = [((2, 320, 64, 64), 32, torch.float32), ((2, 320, 64, 64), 32, torch.bfloat16), ((2, 1280, 8, 8), 32, torch.float32)]


def case(shape, groups, dtype, device):
    tensor = torch.Size(shape).numel() * dtype.itemsize

    def make():
        return *(t.requires_grad_() for t in inputs(shape, device, dtype)[:3]), groups

    return BenchCase(
        name=f"{'x'.join(map(str, shape))} {groups} groups {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={"liger": lambda x, weight, bias, groups: liger_group_norm(x, weight, bias, shape[1], groups, EPS), "eager": eager},
        forward_bytes=2 * tensor,  # x in, y out
        backward_bytes=3 * tensor,  # dy and x in, dx out
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
