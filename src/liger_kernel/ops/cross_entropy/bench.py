"""Benchmarks of cross_entropy: `liger bench cross_entropy`."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.cross_entropy import liger_cross_entropy
from liger_kernel.ops.cross_entropy.ref import eager

CPU = [(512, 32000), (256, 151936)]
CUDA = [(8192, 32000), (8192, 128256), (4096, 151936), (2048, 262144), (1024, 1048576), (8192, 50257)]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def cases(device):
    """Training steps of the loss alone. The gradient is written in forward, so forward counts its bytes too."""
    on_cpu = torch.device(device).type == "cpu"
    result = []
    for dtype in (torch.float32, torch.bfloat16) if on_cpu else (torch.bfloat16,):
        for rows, vocab in CPU if on_cpu else CUDA:
            def make(rows=rows, vocab=vocab, dtype=dtype):
                x = torch.randn(rows, vocab, device=device, dtype=dtype).requires_grad_()
                return x, torch.randint(vocab, (rows,), device=device)

            size = rows * vocab * torch.finfo(dtype).bits // 8
            result.append(BenchCase(
                name=f"{rows}x{vocab} {NAMES[dtype]}",
                make=make,
                contenders={
                    "liger": liger_cross_entropy,
                    "eager": eager,
                    "torch": torch.nn.functional.cross_entropy,
                },
                forward_bytes=2 * size,
                backward_bytes=0,
            ))
    return result
