"""Benchmarks of tiled_mlp; see core/bench.py. It costs a second forward; what it saves is the peak memory."""

import torch

from liger_kernel.core.bench import BenchCase
from liger_kernel.ops.mlp.cases import inputs
from liger_kernel.ops.tiled_mlp import apply_tiled_mlp
from liger_kernel.ops.tiled_mlp.ref import eager
from liger_kernel.ops.tiled_mlp.test_tiled_mlp import Layer

# (tokens, hidden, intermediate, pieces, dtype): Llama-3-8B over a long sequence.
CUDA = [(65536, 4096, 14336, 16, torch.bfloat16)]
CPU = [(2048, 512, 1408, 4, torch.float32), (2048, 512, 1408, 4, torch.bfloat16)]


def case(tokens, hidden, inner, pieces, dtype, device):
    def make():
        return tuple(t.requires_grad_() for t in inputs((1, tokens), hidden, inner, dtype, device))

    def tiled(x, *weights):
        return apply_tiled_mlp(Layer.forward, Layer(*weights), x, pieces)

    weights, activations = 3 * inner * hidden * dtype.itemsize, tokens * hidden * dtype.itemsize
    return BenchCase(
        name=f"{tokens}x{hidden}x{inner} in {pieces} {str(dtype).removeprefix('torch.')}",
        make=make,
        contenders={"liger": tiled, "eager": eager},
        forward_bytes=weights + 2 * activations,
        backward_bytes=2 * weights + 3 * activations,
        flops=4 * 2 * tokens * 3 * inner * hidden,
    )


def cases(device):
    return [case(*shape, device) for shape in (CPU if device == "cpu" else CUDA)]
