"""Benchmarks of fused_linear_cross_entropy; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.fused_linear_cross_entropy.cases import flops, memory
from liger_kernel.ops.fused_linear_cross_entropy.ref import eager

bf16, fp32 = torch.bfloat16, torch.float32
CUDA = [(16384, 4096, 128256, bf16), (16384, 3584, 151936, bf16), (8192, 4096, 128256, bf16), (16384, 896, 151936, bf16),
        (4096, 4096, 50257, bf16)]
CPU = [(512, 896, 151936, fp32), (512, 896, 151936, bf16), (1024, 1024, 32000, fp32)]


def _liger(accum_dtype=None):
    def run(x, weight, target):
        return LigerFusedLinearCrossEntropyFunction.apply(
            x, weight, target, None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype)[0]

    return run


def case(rows, hidden, vocab, dtype, device, ignored=0.0, frozen=False):
    def make():
        x = torch.randn(rows, hidden, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(vocab, hidden, device=device) * 0.02).to(dtype).requires_grad_(not frozen)
        target = torch.randint(vocab, (rows,), device=device)
        target[torch.rand(rows, device=device) < ignored] = -100
        return x, weight, target

    words = f"{rows}x{hidden}x{vocab} {str(dtype).removeprefix('torch.')}"
    words += f", {ignored:.0%} of the labels ignored" if ignored else ""
    words += ", frozen head" if frozen else ""
    contenders = {"liger": _liger(), "eager": eager}
    if dtype == bf16 and device != "cpu":
        contenders["liger, bf16 sum"] = _liger(bf16)
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        contenders["torch"] = lambda x, w, t: torch.nn.functional.linear_cross_entropy(x, w, t, ignore_index=-100)
    moved = memory(rows, hidden, vocab, dtype)
    return BenchCase(name=words, make=make, contenders=contenders, forward_bytes=moved, backward_bytes=moved // 2,
                     flops=flops(int(rows * (1 - ignored)), hidden, vocab, 2 if frozen else 3))


def cases(device):
    shapes = CPU if device == "cpu" else CUDA
    rows = [case(*shape, device) for shape in shapes]
    return rows + [case(*shapes[0], device, ignored=0.5), case(*shapes[0], device, frozen=True)]
