"""Cosine distillation of hidden states through both heads: one minus the cosine between the logits of student and teacher."""

import torch
import torch.nn.functional as F

from liger_kernel.chunked_loss.fused_linear_distillation import BuiltInDistillation, DistillationModule

EXPORTS = ["LigerFusedLinearCosineSimilarityFunction", "LigerFusedLinearCosineSimilarityLoss"]


class LigerFusedLinearCosineSimilarityFunction(BuiltInDistillation):
    """`apply(student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, weight_hard_loss=0.5,
    weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, chunk_size=1024, return_soft_hard_loss=False)`;
    see :class:`LigerFusedLinearCosineSimilarityLoss`."""

    divergence = "cosine"

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=1.0):
        """beta (1 - cos), summed over the tokens that count. Differentiable PyTorch; `apply` runs in the kernels."""
        loss = beta * (1 - F.cosine_similarity(student_logits.float(), teacher_logits.float(), dim=-1, eps=1e-8))
        return (loss if target is None else torch.where(target == ignore_index, 0, loss)).sum()


class LigerFusedLinearCosineSimilarityLoss(DistillationModule):
    """weight_hard_loss times the cross entropy of the student with the labels, plus weight_soft_loss times beta (1 - cos(student logits,
    teacher logits)); both averaged over the labels that are not ignored.

    Arguments, memory and errors as of :class:`liger_kernel.chunked_loss.LigerFusedLinearJSDLoss`; beta may be any number.
    """

    divergence = "cosine"
