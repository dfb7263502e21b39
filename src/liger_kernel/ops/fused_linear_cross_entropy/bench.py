"""Benchmarks of fused_linear_cross_entropy; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction, fused_linear_cross_entropy
from liger_kernel.ops.fused_linear_cross_entropy.cases import flops, memory
from liger_kernel.ops.fused_linear_cross_entropy.ref import eager

bf16, fp32 = torch.bfloat16, torch.float32
CUDA = [(16384, 4096, 128256, bf16), (16384, 3584, 151936, bf16), (8192, 4096, 128256, bf16), (16384, 896, 151936, bf16),
        (8192, 4096, 50257, bf16), (8192, 4096, 50304, bf16), (8192, 3584, 151665, bf16), (8192, 3584, 151680, bf16)]
CHUNK = 4096  # rows of the bare products on CUDA, as the op's own plan
CPU = [(512, 896, 151936, fp32), (512, 896, 151936, bf16), (1024, 1024, 32000, fp32)]


def _liger(accum_dtype=None):
    def run(x, weight, target):
        return LigerFusedLinearCrossEntropyFunction.apply(
            x, weight, target, None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype)[0]

    return run


def bare_products(rows, hidden, vocab, dtype, products):
    """torch's own products of the same chunks, and nothing else: logits, with two products dx, with three dw summed in place."""

    def make():
        x, weight = torch.randn(rows, hidden, device="cuda", dtype=dtype), torch.randn(vocab, hidden, device="cuda", dtype=dtype)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        logits = torch.empty(min(CHUNK, rows), vocab, device="cuda", dtype=dtype)

        def call(_):
            for begin in range(0, rows, CHUNK):
                part = slice(begin, min(begin + CHUNK, rows))
                z = logits[: part.stop - begin]
                torch.mm(x[part], weight.T, out=z)
                if products > 1:
                    torch.mm(z, weight, out=dx[part])
                if products > 2:
                    torch.addmm(dw, z.T, x[part], out=dw)

        return call, flops(rows, hidden, vocab, products), f"bare products ({products}) in chunks of {CHUNK} rows"

    return make


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
    if device != "cpu" and not frozen and not ignored:
        contenders["liger, least memory"] = lambda x, w, t: fused_linear_cross_entropy(x, w, t, accum_dtype=bf16, logits_memory=1)[0]
    moved = memory(rows, hidden, vocab, dtype)
    products = 2 if frozen else 3
    return BenchCase(name=words, make=make, contenders=contenders, forward_bytes=moved, backward_bytes=moved // 2,
                     flops=flops(int(rows * (1 - ignored)), hidden, vocab, products),
                     yardstick=None if device == "cpu" else bare_products(rows, hidden, vocab, dtype, products))


def cases(device):
    shapes = CPU if device == "cpu" else CUDA
    rows = [case(*shape, device) for shape in shapes]
    return rows + [case(*shapes[0], device, ignored=0.5), case(*shapes[0], device, frozen=True)]
