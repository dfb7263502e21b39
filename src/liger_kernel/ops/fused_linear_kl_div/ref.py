"""Fused linear KL divergence in plain PyTorch: the fp64 definition, and eager code as trainers write it."""

import torch
import torch.nn.functional as F


def _reduced(rows, vocab, shift_labels, reduction, ignore_index):
    valid = torch.ones_like(rows, dtype=torch.bool) if shift_labels is None else shift_labels != ignore_index
    total = torch.where(valid, rows, 0).sum()
    if reduction == "sum":
        return total
    return total / (valid.sum().clamp(min=1) * (vocab if reduction == "mean" else 1))


def reference(student_input, student_weight, target, shift_labels=None, reduction="batchmean", ignore_index=-100, temperature=1.0,
              eps=1e-10):
    """By the definition; run it on fp64 tensors for the truth."""
    log_q = torch.log_softmax(F.linear(student_input, student_weight) / temperature, -1)
    rows = (target * (target.clamp(min=eps).log() - log_q)).sum(-1)
    return _reduced(rows, student_weight.shape[0], shift_labels, reduction, ignore_index)


def eager(student_input, student_weight, target, shift_labels=None, reduction="batchmean", ignore_index=-100, temperature=1.0):
    """What a trainer runs: the head's product, the tempered log-softmax in fp32, torch's kl_div."""
    log_q = torch.log_softmax(F.linear(student_input, student_weight).float() / temperature, -1)
    rows = F.kl_div(log_q, target.float(), reduction="none").sum(-1)
    return _reduced(rows, student_weight.shape[0], shift_labels, reduction, ignore_index)
