"""Benchmarks of fused_linear_jsd; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.fused_linear_jsd import liger_fused_linear_jsd
from liger_kernel.ops.fused_linear_jsd.cases import flops, memory
from liger_kernel.ops.fused_linear_jsd.ref import eager

bf16, fp32 = torch.bfloat16, torch.float32
CUDA = [(8192, 4096, 128256, bf16), (8192, 3584, 151936, bf16), (8192, 4096, 32000, bf16)]
CPU = [(512, 896, 151936, fp32), (512, 896, 151936, bf16), (1024, 1024, 32000, fp32)]
CHUNK = 2048  # rows of the bare products on CUDA, as the op's own plan


def bare_products(rows, hidden, vocab, dtype):
    """torch's own products of the same chunks, and nothing else: both heads' logits, dx, and dw summed in place."""
    def make():
        x, t = (torch.randn(rows, hidden, device="cuda", dtype=dtype) for _ in range(2))
        weight, teacher = (torch.randn(vocab, hidden, device="cuda", dtype=dtype) for _ in range(2))
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        logits, other = (torch.empty(min(CHUNK, rows), vocab, device="cuda", dtype=dtype) for _ in range(2))

        def call(_):
            for begin in range(0, rows, CHUNK):
                part = slice(begin, min(begin + CHUNK, rows))
                z = logits[: part.stop - begin]
                torch.mm(x[part], weight.T, out=z)
                torch.mm(t[part], teacher.T, out=other[: part.stop - begin])
                torch.mm(z, weight, out=dx[part])
                torch.addmm(dw, z.T, x[part], out=dw)

        return call, flops(rows, hidden, vocab), f"4 bare products in chunks of {CHUNK} rows"

    return make


def case(rows, hidden, vocab, dtype, device, ignored=0.0):
    def make():
        x, t = (torch.randn(rows, hidden, device=device).to(dtype) for _ in range(2))
        weight, teacher = ((torch.randn(vocab, hidden, device=device) * 0.02).to(dtype) for _ in range(2))
        target = torch.randint(vocab, (rows,), device=device)
        target[torch.rand(rows, device=device) < ignored] = -100
        return x.requires_grad_(), weight.requires_grad_(), t, teacher, target

    words = f"{rows}x{hidden}x{vocab} {str(dtype).removeprefix('torch.')}"
    words += f", {ignored:.0%} of the labels ignored" if ignored else ""
    moved = memory(rows, hidden, vocab, dtype)
    return BenchCase(name=words, make=make, contenders={"liger": liger_fused_linear_jsd, "eager": eager}, forward_bytes=moved,
                     backward_bytes=moved // 3, flops=flops(int(rows * (1 - ignored)), hidden, vocab),
                     yardstick=None if device == "cpu" else bare_products(rows, hidden, vocab, dtype))


def cases(device):
    shapes = CPU if device == "cpu" else CUDA
    return [case(*shape, device) for shape in shapes] + [case(*shapes[0], device, ignored=0.5)]
