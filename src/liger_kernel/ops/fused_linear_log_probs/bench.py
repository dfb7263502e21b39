"""Benchmarks of fused_linear_log_probs; see core/bench.py. `liger bench` adds torch.compile of eager and, as a yardstick, bare GEMMs."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.fused_linear_cross_entropy.bench import bare_products
from liger_kernel.ops.fused_linear_log_probs import fused_linear_log_probs, log_probs_and_gradients
from liger_kernel.ops.fused_linear_log_probs.cases import flops, memory
from liger_kernel.ops.fused_linear_log_probs.ref import eager

bf16, fp32 = torch.bfloat16, torch.float32
CUDA = [(8192, 4096, 128256, bf16), (16384, 896, 151936, bf16)]
CPU = [(512, 896, 151936, fp32), (512, 896, 151936, bf16), (1024, 1024, 32000, fp32)]


class _OnePass(torch.autograd.Function):
    """The mean negative log-probability, its gradients made in forward."""

    @staticmethod
    def forward(ctx, x, weight, target):
        results, dx, dw, _ = log_probs_and_gradients(
            x, weight, target, lambda begin, end, chunk: torch.full_like(chunk.logp, -1 / target.numel()))
        ctx.save_for_backward(dx, dw)
        return -results.logp.mean()

    @staticmethod
    def backward(ctx, _):
        return (*ctx.saved_tensors, None)


def _make(rows, hidden, vocab, dtype, device):
    def make():
        x = torch.randn(rows, hidden, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(vocab, hidden, device=device) * 0.02).to(dtype).requires_grad_()
        return x, weight, torch.randint(vocab, (rows,), device=device)

    return make


def case(rows, hidden, vocab, dtype, device, kind):
    contenders = {
        "log-probs": {"liger": lambda x, w, t: fused_linear_log_probs(x, w, t).logp, "eager": eager},
        "log-probs and entropy": {
            "liger": lambda x, w, t: tuple(vars(fused_linear_log_probs(x, w, t, return_entropy=True)).values())[:2],
            "eager": lambda x, w, t: eager(x, w, t, want_entropy=True),
        },
        "mean loss": {"liger": _OnePass.apply, "eager": lambda x, w, t: -eager(x, w, t).mean()},
    }[kind]
    forward, both = memory(rows, hidden, vocab, dtype, gradients=False), memory(rows, hidden, vocab, dtype)
    name = f"{rows}x{hidden}x{vocab} {str(dtype).removeprefix('torch.')}, {kind}"
    return BenchCase(name=name, make=_make(rows, hidden, vocab, dtype, device), contenders=contenders,
                     forward_bytes=forward, backward_bytes=both, flops=flops(rows, hidden, vocab, 3),
                     yardstick=None if device == "cpu" else bare_products(rows, hidden, vocab, dtype, 3 if kind == "mean loss" else 1))


def cases(device):
    shapes = CPU if device == "cpu" else CUDA
    return [case(*shape, device, kind) for shape in shapes for kind in ("log-probs", "log-probs and entropy", "mean loss")]
