"""Benchmarks of the preference losses; see core/bench.py. The bound of bytes is that of inputs and gradients alone."""

import torch

from liger_kernel.chunked_loss import preference_cases, ref
from liger_kernel.core.bench import BenchCase

bf16, fp32 = torch.bfloat16, torch.float32
# (sequences, T, H, V, dtype); C44 is the first
CUDA = [(8, 1024, 896, 151936, bf16), (8, 2048, 4096, 128256, bf16), (2, 8192, 4096, 128256, bf16)]
CPU = [(2, 256, 896, 151936, fp32), (2, 256, 896, 151936, bf16), (8, 128, 896, 151936, fp32), (8, 128, 896, 151936, bf16)]
LOSSES = {"dpo": "dpo sigmoid", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}


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
                     flops=products * 2 * tokens * hidden * vocab)


def cases(device):
    return [case(name, *shape, device) for shape in (CPU if device == "cpu" else CUDA) for name in LOSSES]
