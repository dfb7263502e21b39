"""Benchmarks of grpo_loss; see core/bench.py."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.grpo_loss import triton_grpo_loss
from liger_kernel.ops.grpo_loss.cases import inputs, memory
from liger_kernel.ops.grpo_loss.ref import eager

bf16, fp32 = torch.bfloat16, torch.float32
CUDA = [(8, 1024, 151936, bf16), (8, 1024, 32000, bf16)]
CPU = [(2, 128, 151936, fp32), (2, 128, 151936, bf16)]


def case(shape, dtype, device):
    def make():
        logits, ids, mask, advantages, ref, old, _ = inputs(shape, dtype, device)
        return logits.requires_grad_(), ids, torch.ones_like(mask), advantages, ref, old

    def liger(logits, ids, mask, advantages, ref, old):
        return triton_grpo_loss(logits, old, ref, ids, advantages, mask, 0.9, 0.04, 0.2, 0.2, False, "grpo", reduce=True)[0]

    def theirs(logits, ids, mask, advantages, ref, old):
        return eager(logits, ids, mask, advantages, ref, old, 0.9, beta=0.04)

    size = memory(*shape, dtype)
    return BenchCase(name=f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}", make=make,
                     contenders={"liger": liger, "eager": theirs}, forward_bytes=size, backward_bytes=2 * size)


def cases(device):
    return [case(shape[:3], shape[3], device) for shape in (CPU if device == "cpu" else CUDA)]
