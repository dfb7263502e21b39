"""Shapes of fused_linear_kl_div; its error bound is that of :mod:`liger_kernel.ops.fused_linear_jsd.cases`."""

import torch

from liger_kernel.ops.fused_linear_jsd import cases as jsd

# (rows, hidden, vocab)
SHAPES = [(1, 8, 2), (4, 16, 1), (5, 24, 33), (70, 64, 1003), (300, 32, 515), (4, 16, 32003)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["batchmean", "mean", "sum"]


def flops(rows, hidden, vocab):
    """Logits, dx and dw take one product each."""
    return jsd.flops(rows, hidden, vocab, products=3)


def memory(rows, hidden, vocab, dtype):
    """Bytes of the inputs, the probabilities and both gradients: the least that has to move."""
    return (2 * (rows + vocab) * hidden + rows * vocab) * dtype.itemsize


def bounds(student_input, student_weight, target, shift_labels=None, reduction="batchmean", ignore_index=-100, temperature=1.0, eps=1e-10):
    return jsd.Bounds(student_input, student_weight, target, None, shift_labels, divergence="probabilities", temperature=temperature,
                      ignore_index=ignore_index, mean=reduction != "sum", eps=eps,
                      factor=1 / student_weight.shape[0] if reduction == "mean" else 1.0)
