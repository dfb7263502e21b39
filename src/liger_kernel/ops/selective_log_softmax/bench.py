"""Benchmarks of selective_log_softmax; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.selective_log_softmax import selective_log_softmax
from liger_kernel.ops.selective_log_softmax.cases import memory
from liger_kernel.ops.selective_log_softmax.ref import eager

bf16, fp32 = torch.bfloat16, torch.float32
CUDA = [(8, 1024, 151936, bf16), (8, 1024, 32000, bf16), (8, 1024, 128256, fp32)]
CPU = [(2, 128, 151936, fp32), (2, 128, 151936, bf16)]


def case(sequences, tokens, vocab, dtype, device):
    def make():
        logits = torch.randn(sequences, tokens, vocab, device=device, dtype=dtype).requires_grad_()
        return logits, torch.randint(vocab, (sequences, tokens), device=device)

    size = memory(sequences, tokens, vocab, dtype)
    return BenchCase(name=f"{sequences}x{tokens}x{vocab} {str(dtype).removeprefix('torch.')}", make=make,
                     contenders={"liger": selective_log_softmax, "eager": eager}, forward_bytes=size, backward_bytes=2 * size)


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
