"""Contrastive preference optimisation (Xu et al. 2024, arXiv 2401.08417)."""

import torch
import torch.nn.functional as F

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.sequences import call, per_group

EXPORTS = ["LigerFusedLinearCPOFunction", "LigerFusedLinearCPOLoss"]


class LigerFusedLinearCPOFunction(LigerFusedLinearPreferenceBase):
    """`apply(_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True,
    compiled=True, average_log_prob=False, chunk_size=1)` -> (loss, metrics); see :class:`LigerFusedLinearCPOLoss`."""

    @staticmethod
    @per_group
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1, label_smoothing=0.0):
        """-> (loss, chosen_rewards (n,), rejected_rewards (n,)). Log-probabilities (n,)."""
        d = beta * (chosen_logps - rejected_logps)
        losses = -(1 - label_smoothing) * F.logsigmoid(d) - label_smoothing * F.logsigmoid(-d)
        return losses.sum() / max(full_target.shape[0] // 2, 1), beta * chosen_logps, beta * rejected_logps

    @classmethod
    def forward(cls, ctx, _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0,
                compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1):
        return LigerFusedLinearPreferenceBase.forward(
            cls, ctx, _input, weight, target, bias, chunk_size, ignore_index, alpha, beta, compute_nll_loss, compiled=compiled,
            average_log_prob=average_log_prob, label_smoothing=label_smoothing)


class LigerFusedLinearCPOLoss(torch.nn.Module):
    """alpha NLL + the mean over pairs of -(1 - s) logsig(D) - s logsig(-D), D = beta (chosen - rejected log-probability).

    Args:
        ignore_index, beta, alpha, compute_nll_loss, average_log_prob: as of :meth:`LigerFusedLinearPreferenceBase.forward`.
        label_smoothing: s, the probability that a pair is the wrong way round.
        compiled, chunk_size: accepted; nothing depends on them.
    """

    def __init__(self, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True,
                 average_log_prob=False, chunk_size=1):
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.label_smoothing = ignore_index, beta, alpha, label_smoothing
        self.compute_nll_loss, self.compiled, self.average_log_prob, self.chunk_size = (
            compute_nll_loss, compiled, average_log_prob, chunk_size)

    def forward(self, lin_weight, _input, target, bias=None):
        """-> (loss, (chosen_logps (n,), rejected_logps (n,), chosen_logits_mean, rejected_logits_mean, nll_loss, chosen_rewards (n,),
        rejected_rewards (n,))), rewards being beta times the log-probabilities; arguments as of
        :meth:`LigerFusedLinearPreferenceBase.forward`."""
        return call(
            LigerFusedLinearCPOFunction, _input, lin_weight, target, bias, self.ignore_index, self.beta, self.alpha, self.label_smoothing,
            self.compute_nll_loss, self.compiled, self.average_log_prob, self.chunk_size)
