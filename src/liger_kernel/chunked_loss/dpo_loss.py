"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and losses of the same form."""

import math

import torch
import torch.nn.functional as F

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.sequences import call, per_group

EXPORTS = ["LigerFusedLinearDPOFunction", "LigerFusedLinearDPOLoss"]


def _discopop(d, tau):
    """-logsig(D) (1 - m) + e^(-D) m, m = sig(D / tau). The second product in one exponential: D below -88 would be inf times 0."""
    return -F.logsigmoid(d) * torch.sigmoid(-d / tau) + torch.exp(F.logsigmoid(d / tau) - d)


def _exo_pair(d, smoothing):
    return torch.sigmoid(d) * (F.logsigmoid(d) - math.log1p(-smoothing)) + torch.sigmoid(-d) * (F.logsigmoid(-d) - math.log(smoothing))


# loss_type -> (a, b, D, beta, label_smoothing, discopop_tau) -> loss of each pair, with the log-ratios to the reference model a of the
# chosen and b of the rejected sequence, and D = beta (a - b).
_PAIR_LOSSES = {
    "sigmoid": lambda a, b, d, beta, s, tau: -F.logsigmoid(d),
    "hinge": lambda a, b, d, beta, s, tau: torch.relu(1 - d),
    # arXiv 2402.00856, equation 16
    "exo_pair": lambda a, b, d, beta, s, tau: _exo_pair(d, s),
    # arXiv 2402.05369
    "nca_pair": lambda a, b, d, beta, s, tau: -F.logsigmoid(beta * a) - 0.5 * F.logsigmoid(-beta * a) - 0.5 * F.logsigmoid(-beta * b),
    # arXiv 2403.00409
    "robust": lambda a, b, d, beta, s, tau: (s * F.logsigmoid(-d) - (1 - s) * F.logsigmoid(d)) / (1 - 2 * s),
    # arXiv 2404.04656
    "bco_pair": lambda a, b, d, beta, s, tau: -F.logsigmoid(beta * a) - F.logsigmoid(-beta * b),
    # arXiv 2405.00675, equation 4.7
    "sppo_hard": lambda a, b, d, beta, s, tau: (a - 0.5 / beta) ** 2 + (b + 0.5 / beta) ** 2,
    # arXiv 2408.06266, equations 7 and 8
    "apo_zero": lambda a, b, d, beta, s, tau: torch.sigmoid(-beta * a) + torch.sigmoid(beta * b),
    "apo_down": lambda a, b, d, beta, s, tau: torch.sigmoid(beta * a) + torch.sigmoid(-d),
    # arXiv 2406.08414, equation 5
    "discopop": lambda a, b, d, beta, s, tau: _discopop(d, tau),
}


def _check(loss_type, label_smoothing):
    if loss_type not in _PAIR_LOSSES:
        raise ValueError(f"DPO loss: loss_type is {loss_type!r}, expected one of {', '.join(_PAIR_LOSSES)}")
    if loss_type == "exo_pair" and label_smoothing <= 0:
        raise ValueError(f"DPO loss: label_smoothing is {label_smoothing}; loss_type 'exo_pair' needs one above 0, 1e-3 for instance")
    if loss_type == "robust" and not 0 <= label_smoothing < 0.5:
        raise ValueError(f"DPO loss: label_smoothing is {label_smoothing}; loss_type 'robust' needs one in [0, 0.5)")


class LigerFusedLinearDPOFunction(LigerFusedLinearPreferenceBase):
    """`apply(_input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100, beta=0.1,
    compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1, loss_type="sigmoid",
    label_smoothing=0.0, discopop_tau=0.05, alpha=1.0)` -> (loss, metrics); see :class:`LigerFusedLinearDPOLoss`.

    Raises besides: NotImplementedError for "ipo", which needs the numbers of tokens.
    """

    @staticmethod
    @per_group
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, ref_chosen_logps=None, ref_rejected_logps=None, beta=0.1,
                           loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05):
        """-> (loss, chosen_rewards (n,), rejected_rewards (n,)). Log-probabilities (n,); those of no reference model are 0."""
        if loss_type == "ipo":
            raise NotImplementedError("DPO loss: loss_type 'ipo' needs the number of tokens of each sequence, which is not known here")
        _check(loss_type, label_smoothing)
        a = chosen_logps if ref_chosen_logps is None else chosen_logps - ref_chosen_logps
        b = rejected_logps if ref_rejected_logps is None else rejected_logps - ref_rejected_logps
        losses = _PAIR_LOSSES[loss_type](a, b, beta * (a - b), beta, label_smoothing, discopop_tau)
        return losses.sum() / max(full_target.shape[0] // 2, 1), beta * a, beta * b

    @classmethod
    def forward(cls, ctx, _input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100, beta=0.1,
                compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1, loss_type="sigmoid",
                label_smoothing=0.0, discopop_tau=0.05, alpha=1.0):
        return LigerFusedLinearPreferenceBase.forward(
            cls, ctx, _input, weight, target, bias, chunk_size, ignore_index, alpha, beta, compute_nll_loss, None, compiled, use_ref_model,
            ref_input, ref_weight, ref_bias, average_log_prob, loss_type=loss_type, label_smoothing=label_smoothing,
            discopop_tau=discopop_tau)


class LigerFusedLinearDPOLoss(torch.nn.Module):
    """alpha NLL + the mean over pairs of a loss of the log-ratios a (chosen) and b (rejected) to the reference model, D = beta (a - b).

    | loss_type | loss of a pair, s = label_smoothing |
    |---|---|
    | sigmoid | -logsig(D) |
    | hinge | max(0, 1 - D) |
    | exo_pair | sig(D) (logsig(D) - log1p(-s)) + sig(-D) (logsig(-D) - log s) |
    | nca_pair | -logsig(beta a) - 0.5 logsig(-beta a) - 0.5 logsig(-beta b) |
    | robust | (-(1 - s) logsig(D) + s logsig(-D)) / (1 - 2 s) |
    | bco_pair | -logsig(beta a) - logsig(-beta b) |
    | sppo_hard | (a - 1 / (2 beta))^2 + (b + 1 / (2 beta))^2 |
    | apo_zero | 1 - sig(beta a) + sig(beta b) |
    | apo_down | sig(beta a) + 1 - sig(D) |
    | discopop | -logsig(D) (1 - m) + e^(-D) m, m = sig(D / discopop_tau) |

    Args:
        ignore_index, beta, alpha, compute_nll_loss, average_log_prob: as of :meth:`LigerFusedLinearPreferenceBase.forward`.
        use_ref_model: whether there is a reference model; without one a and b are the log-probabilities themselves.
        compiled, chunk_size: accepted; nothing depends on them.
        loss_type, label_smoothing, discopop_tau: see above.

    Raises:
        ValueError: another loss_type; exo_pair with label_smoothing <= 0; robust with one outside [0, 0.5).
    """

    def __init__(self, ignore_index=-100, beta=0.1, alpha=1.0, compute_nll_loss=False, compiled=True, use_ref_model=True,
                 average_log_prob=False, chunk_size=1, loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05):
        super().__init__()
        _check(loss_type, label_smoothing)
        self.ignore_index, self.beta, self.alpha, self.compute_nll_loss = ignore_index, beta, alpha, compute_nll_loss
        self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size = compiled, use_ref_model, average_log_prob, chunk_size
        self.loss_type, self.label_smoothing, self.discopop_tau = loss_type, label_smoothing, discopop_tau

    def forward(self, lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None):
        """-> (loss, (chosen_logps (n,), rejected_logps (n,), chosen_logits_mean, rejected_logits_mean, nll_loss, chosen_rewards (n,),
        rejected_rewards (n,))), rewards being beta a and beta b; arguments as of :meth:`LigerFusedLinearPreferenceBase.forward`."""
        return call(
            LigerFusedLinearDPOFunction, _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, self.ignore_index, self.beta,
            self.compute_nll_loss, self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size, self.loss_type,
            self.label_smoothing, self.discopop_tau, self.alpha)
