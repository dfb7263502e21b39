"""Benchmarks of the preference losses; see core/bench.py. The bound of bytes is that of inputs and gradients alone."""

import math

import torch

from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, preference_cases, ref
from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.fused_linear_cross_entropy.bench import bare_products

bf16, fp32 = torch.bfloat16, torch.float32
# (sequences, T, H, V, dtype); C44 is the first
CUDA = [(8, 1024, 4096, 128256, bf16), (8, 1024, 896, 151936, bf16)]
CPU = [(2, 256, 896, 151936, fp32), (2, 256, 896, 151936, bf16), (8, 128, 896, 151936, fp32), (8, 128, 896, 151936, bf16)]
LOSSES = {"dpo": "dpo sigmoid", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}  # dpo and kto with a reference model


def _make(sequences, length, hidden, vocab, dtype, device, reference):
    def make():
        def normal(*shape, scale=1.0):
            return (torch.randn(*shape, device=device) * scale).to(dtype)

        x, weight = normal(sequences, length, hidden).requires_grad_(), normal(vocab, hidden, scale=0.02).requires_grad_()
        others = (normal(sequences, length, hidden), normal(vocab, hidden, scale=0.02)) if reference else (None, None)
        return x, weight, torch.randint(vocab, (sequences, length), device=device), *others

    return make


def _contenders(name):
    loss = (preference_cases.PAIRED | preference_cases.KTO)[LOSSES[name]]
    module = loss.module(**loss.options)

    def liger(x, weight, target, ref_x, ref_weight):
        extra = {} if ref_x is None else {"ref_input": ref_x, "ref_weight": ref_weight}
        if name == "kto":
            extra["preference_labels"] = torch.arange(x.shape[0], device=x.device) % 2 == 0
        return module(_input=x, lin_weight=weight, target=target, **extra)

    def eager(x, weight, target, ref_x, ref_weight):
        reference = None if ref_x is None else (ref_x, ref_weight, None)
        if name == "kto":
            return ref.kto(x, weight, target, torch.arange(x.shape[0], device=x.device) % 2 == 0, None, reference, **loss.truth)
        return ref.paired(name, x, weight, target, None, reference, **loss.truth)

    return {"liger": liger, "eager": eager}, loss.has_reference


def case(name, sequences, length, hidden, vocab, dtype, device):
    contenders, reference = _contenders(name)
    tokens, products = sequences * length, 4 if reference else 3
    size = (tokens + vocab) * hidden * dtype.itemsize
    return BenchCase(name=f"{name} {sequences}x{length}x{hidden}x{vocab} {str(dtype).removeprefix('torch.')}",
                     make=_make(sequences, length, hidden, vocab, dtype, device, reference), contenders=contenders,
                     forward_bytes=size * (2 if reference else 1), backward_bytes=size * (3 if reference else 2),
                     flops=products * 2 * tokens * hidden * vocab,
                     yardstick=None if device == "cpu" else bare_products(tokens, hidden, vocab, dtype, 3))


def grpo_case(sequences, length, hidden, vocab, dtype, device, level):
    """GRPO without a KL term: old log-probabilities given, one coefficient a token or a sequence."""
    def make():
        x = torch.randn(sequences, length, hidden, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(vocab, hidden, device=device) * 0.02).to(dtype).requires_grad_()
        old = -torch.rand(sequences, length, device=device) * 0.1 - math.log(vocab)
        return (x, weight, torch.randint(vocab, (sequences, length), device=device), torch.ones(sequences, length, device=device),
                torch.randn(sequences, device=device), old)

    module = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, importance_sampling_level=level)

    def liger(x, weight, ids, mask, advantages, old):
        return module(x, weight, ids, mask, advantages, old_per_token_logps=old)[0]

    def eager(x, weight, ids, mask, advantages, old):
        logp = torch.log_softmax((x @ weight.T).float(), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        log_ratio = logp - old
        if level == "sequence":
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1)).unsqueeze(-1)
        ratio, advantage = log_ratio.exp(), advantages.unsqueeze(-1)
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return (loss * mask).sum() / mask.sum()

    tokens, size = sequences * length, (sequences * length + vocab) * hidden * dtype.itemsize
    return BenchCase(name=f"grpo {level} {sequences}x{length}x{hidden}x{vocab} {str(dtype).removeprefix('torch.')}", make=make,
                     contenders={"liger": liger, "eager": eager}, forward_bytes=size, backward_bytes=2 * size,
                     flops=3 * 2 * tokens * hidden * vocab,
                     yardstick=None if device == "cpu" else bare_products(tokens, hidden, vocab, dtype, 3))


def cases(device):
    shapes = CPU if device == "cpu" else CUDA
    return ([case(name, *shape, device) for shape in shapes for name in LOSSES]
            + [grpo_case(*shape, device, level) for shape in shapes for level in ("token", "sequence")])
