"""Distillation losses in plain PyTorch on whole logits: the fp64 definition, and eager code as trainers write it."""

import torch
import torch.nn.functional as F

from liger_kernel.ops.fused_linear_jsd import ref as fused_linear_jsd
from liger_kernel.ops.jsd import ref as jsd


def reference(student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, teacher_bias=None,
              weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, divergence="jsd"):
    """(loss, soft, hard); run it on fp64 tensors for the truth. Tokens of any leading dimensions."""
    x, t = student_input.flatten(0, -2), teacher_input.flatten(0, -2)
    target = true_labels.flatten()
    _, soft, _ = fused_linear_jsd.reference(x, student_weight, t, teacher_weight, target, student_bias, teacher_bias, ignore_index,
                                            divergence=divergence, beta=beta, temperature=temperature)
    valid = target != ignore_index
    rows = F.cross_entropy(F.linear(x, student_weight, student_bias), torch.where(valid, target, 0), reduction="none")
    hard = torch.where(valid, rows, 0).sum() / valid.sum().clamp(min=1)
    return weight_hard_loss * hard + weight_soft_loss * soft, soft, hard


def eager(student_input, student_weight, teacher_input, teacher_weight, true_labels, beta=0.5, ignore_index=-100, temperature=1.0,
          weight_hard_loss=0.5, weight_soft_loss=0.5):
    """What a trainer runs: both heads' logits in fp32, torch's losses."""
    student, teacher = F.linear(student_input, student_weight).float(), F.linear(teacher_input, teacher_weight).float()
    log_q, log_p = (torch.log_softmax(z / temperature, -1) for z in (student, teacher))
    soft = jsd.eager(log_q, log_p, true_labels, beta, ignore_index)
    hard = F.cross_entropy(student, true_labels, ignore_index=ignore_index) if weight_hard_loss else 0.0
    return weight_hard_loss * hard + weight_soft_loss * soft
