"""Benchmarks of tiled_mlp; see core/bench.py. It costs a second forward; what it saves is the peak memory."""

import torch

from liger_kernel.ops.mlp.bench import case
from liger_kernel.ops.tiled_mlp import apply_tiled_mlp
from liger_kernel.ops.tiled_mlp.cases import Layer

# (tokens, hidden, intermediate, pieces, dtype): Llama-3-8B over a long sequence.
CUDA = [(65536, 4096, 14336, 16, torch.bfloat16)]
CPU = [(2048, 512, 1408, 4, torch.float32), (2048, 512, 1408, 4, torch.bfloat16)]


def tiled(pieces):
    return lambda x, *weights: apply_tiled_mlp(Layer.forward, Layer(*weights), x, pieces)


def cases(device):
    return [case(tokens, hidden, inner, dtype, device, tiled(pieces), f" in {pieces}")
            for tokens, hidden, inner, pieces, dtype in (CPU if device == "cpu" else CUDA)]
