"""Benchmarks of jsd: `liger bench jsd`."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.jsd import liger_jsd
from liger_kernel.ops.jsd.cases import bytes_moved
from liger_kernel.ops.jsd.ref import eager

CPU = [(512, 32000), (256, 151936)]
CUDA = [(8192, 32000), (8192, 128256), (4096, 151936), (8192, 50257)]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def cases(device):
    """Training steps of the loss alone. The gradient is written in forward, so forward counts its bytes too."""
    on_cpu = torch.device(device).type == "cpu"
    result = []
    for dtype in (torch.float32, torch.bfloat16) if on_cpu else (torch.bfloat16,):
        for rows, vocab in CPU if on_cpu else CUDA:
            def make(rows=rows, vocab=vocab, dtype=dtype):
                x, y = (torch.log_softmax(torch.randn(rows, vocab, device=device), -1).to(dtype) for _ in range(2))
                return x.requires_grad_(), y

            result.append(BenchCase(
                name=f"{rows}x{vocab} {NAMES[dtype]}",
                make=make,
                contenders={"liger": liger_jsd, "eager": eager},
                forward_bytes=bytes_moved(rows, vocab, dtype),
                backward_bytes=0,
            ))
    return result
