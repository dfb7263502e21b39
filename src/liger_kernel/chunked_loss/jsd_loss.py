"""Jensen-Shannon distillation of hidden states through both heads (Agarwal et al. 2024, "On-Policy Distillation of Language Models")."""

import torch
import torch.nn.functional as F

from liger_kernel.chunked_loss.fused_linear_distillation import BuiltInDistillation, DistillationModule

EXPORTS = ["LigerFusedLinearJSDFunction", "LigerFusedLinearJSDLoss"]


class LigerFusedLinearJSDFunction(BuiltInDistillation):
    """`apply(student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, weight_hard_loss=0.5,
    weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, chunk_size=1024, return_soft_hard_loss=False)`;
    see :class:`LigerFusedLinearJSDLoss`."""

    divergence = "jsd"

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=0.5):
        """beta KL(T || M) + (1 - beta) KL(S || M) of tempered logits, M = beta T + (1 - beta) S, summed over the tokens that count;
        beta = 0 is KL(T || S), beta = 1 is KL(S || T). Differentiable PyTorch; `apply` runs in the kernels."""
        student, teacher = (torch.log_softmax(t, -1, dtype=torch.float32) for t in (student_logits, teacher_logits))

        def kl(log_q, log_p):  # KL(P || Q)
            return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)

        if beta == 0:
            loss = kl(student, teacher)
        elif beta == 1:
            loss = kl(teacher, student)
        else:
            share = torch.tensor(beta, dtype=torch.float32, device=student.device)
            mixture = torch.logaddexp(student + torch.log1p(-share), teacher + share.log())
            loss = beta * kl(mixture, teacher) + (1 - beta) * kl(mixture, student)
        return (loss if target is None else torch.where(target == ignore_index, 0, loss)).sum()


class LigerFusedLinearJSDLoss(DistillationModule):
    """weight_hard_loss times the cross entropy of the student with the labels, plus weight_soft_loss times the generalised Jensen-Shannon
    divergence between the softmax of both models' logits / temperature; both averaged over the labels that are not ignored.

    `LigerFusedLinearJSDLoss(weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True,
    chunk_size=1024, return_soft_hard_loss=False)`; `forward(student_input, student_weight, teacher_input, teacher_weight, true_labels,
    student_bias=None, teacher_bias=None)`. Logits are made a chunk of tokens at a time; `compiled` is accepted and changes nothing,
    `chunk_size` below 1024 asks for less memory (not below 640 tokens on CUDA, 96 on the CPU).

    Raises:
        AssertionError: temperature is not positive; with a hard loss, a label out of range.
        ValueError: beta outside [0, 1]; shapes that do not fit; a teacher's vocabulary smaller than the student's.
    """

    divergence = "jsd"
