"""Distillation losses of two linear layers in plain PyTorch: the fp64 definition, and eager code as trainers write it."""

import torch
import torch.nn.functional as F

from liger_kernel.ops.jsd import ref as jsd


def soft_rows(student, teacher, divergence="jsd", beta=0.5, temperature=1.0, eps=1e-10):
    """(rows,) soft losses of logits; "probabilities": `teacher` holds p."""
    student = student / temperature
    if divergence == "probabilities":
        own = teacher * (teacher.clamp(min=eps).log() - torch.log_softmax(student, -1))
        return torch.where(teacher == 0, 0, own).sum(-1)
    teacher = teacher / temperature
    student = F.pad(student, (0, teacher.shape[-1] - student.shape[-1]))
    if divergence == "cosine":
        return beta * (1 - F.cosine_similarity(student, teacher, dim=-1, eps=1e-8))
    return jsd.rows(torch.log_softmax(student, -1), torch.log_softmax(teacher, -1), beta)


def reference(x, weight, teacher, teacher_weight=None, target=None, bias=None, teacher_bias=None, ignore_index=-100, soft_weight=1.0,
              hard_weight=0.0, mean=True, factor=1.0, **options):
    """(loss, soft, hard) by the definition; run it on fp64 tensors for the truth."""
    student = F.linear(x, weight, bias)
    other = teacher if teacher_weight is None else F.linear(teacher, teacher_weight, teacher_bias)
    soft, hard = soft_rows(student, other, **options), torch.zeros_like(student[:, 0])
    if target is None:
        n = max(len(soft), 1)
    else:
        valid = target != ignore_index
        n, soft = valid.sum().clamp(min=1), torch.where(valid, soft, 0)
        if hard_weight:
            hard = F.cross_entropy(student, torch.where(valid, target, 0), reduction="none")
            hard = torch.where(valid, hard, 0)
    soft, hard = ((t.sum() * factor / n if mean else t.sum() * factor) for t in (soft, hard))
    return soft_weight * soft + hard_weight * hard, soft, hard


def eager(x, weight, teacher, teacher_weight, target=None, beta=0.5, ignore_index=-100, temperature=1.0):
    """What a trainer runs: both heads' products, the tempered log-softmax in fp32, torch's kl_div."""
    student, other = (F.linear(a, w).float() / temperature for a, w in ((x, weight), (teacher, teacher_weight)))
    return jsd.eager(torch.log_softmax(student, -1), torch.log_softmax(other, -1), target, beta, ignore_index)
