"""Odds-ratio preference optimisation (Hong et al. 2024, arXiv 2403.07691)."""

import torch
import torch.nn.functional as F

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.sequences import call, per_group

EXPORTS = ["LigerFusedLinearORPOFunction", "LigerFusedLinearORPOLoss"]


def _log_odds(logp):
    """log(p / (1 - p)). 1 - p = -expm1(log p) is right for p near 1; the clamp keeps a p of 1, and an empty sequence, finite."""
    return logp - torch.log(-torch.expm1(logp.clamp(max=-1e-30)))


class LigerFusedLinearORPOFunction(LigerFusedLinearPreferenceBase):
    """`apply(_input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None, compiled=True,
    chunk_size=1)` -> (loss, metrics); see :class:`LigerFusedLinearORPOLoss`."""

    @staticmethod
    @per_group
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1):
        """-> (loss, chosen_rewards (n,), rejected_rewards (n,), log_odds_ratio, log_odds_chosen). Log-probabilities (n,), means over
        the tokens."""
        n = max(full_target.shape[0] // 2, 1)
        log_odds = _log_odds(chosen_logps) - _log_odds(rejected_logps)
        ratio = F.logsigmoid(log_odds).sum() / n
        return -beta * ratio, beta * chosen_logps, beta * rejected_logps, ratio, log_odds.sum() / n

    @classmethod
    def forward(cls, ctx, _input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None,
                compiled=True, chunk_size=1):
        return LigerFusedLinearPreferenceBase.forward(
            cls, ctx, _input, weight, target, bias, chunk_size, ignore_index, 1.0, beta, compute_nll_loss, nll_target, compiled,
            average_log_prob=True)


class LigerFusedLinearORPOLoss(torch.nn.Module):
    """NLL - beta times the mean over pairs of logsig(o), o the difference of the log-odds c - log(1 - e^c) of the chosen and the
    rejected sequence, c being log-probabilities averaged over a sequence's tokens.

    Args:
        ignore_index, beta, compute_nll_loss: as of :meth:`LigerFusedLinearPreferenceBase.forward`.
        compiled, chunk_size: accepted; nothing depends on them.
    """

    def __init__(self, ignore_index=-100, beta=0.1, compute_nll_loss=True, compiled=True, chunk_size=1):
        super().__init__()
        self.ignore_index, self.beta, self.compute_nll_loss, self.compiled, self.chunk_size = (
            ignore_index, beta, compute_nll_loss, compiled, chunk_size)

    def forward(self, lin_weight, _input, target, bias=None, nll_target=None):
        """-> (loss, (chosen_logps (n,), rejected_logps (n,), chosen_logits_mean, rejected_logits_mean, nll_loss, chosen_rewards (n,),
        rejected_rewards (n,), log_odds_ratio = mean logsig(o), log_odds_chosen = mean o)), rewards being beta times the averages;
        arguments as of :meth:`LigerFusedLinearPreferenceBase.forward`."""
        return call(
            LigerFusedLinearORPOFunction, _input, lin_weight, target, bias, self.ignore_index, self.beta, self.compute_nll_loss, nll_target,
            self.compiled, self.chunk_size)
