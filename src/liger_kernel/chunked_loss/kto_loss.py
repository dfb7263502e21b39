"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306)."""

import torch

from liger_kernel.chunked_loss.fused_linear_unpaired_preference import LigerFusedLinearUnpairedPreferenceBase
from liger_kernel.chunked_loss.sequences import call, per_group

EXPORTS = ["LigerFusedLinearKTOFunction", "LigerFusedLinearKTOLoss"]


class LigerFusedLinearKTOFunction(LigerFusedLinearUnpairedPreferenceBase):
    """`apply(_input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None, kl=None,
    ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1)` -> (loss, metrics); see
    :class:`LigerFusedLinearKTOLoss`."""

    @staticmethod
    @per_group
    def preference_loss_fn(log_prob_chunk, preference_labels_chunk, full_target, ref_log_prob_chunk=None, beta=0.1, kl=None):
        """-> (loss, chosen_rewards_sum, rejected_rewards_sum). Log-probabilities (B,); those of no reference model, and kl, are 0."""
        ratio = log_prob_chunk if ref_log_prob_chunk is None else log_prob_chunk - ref_log_prob_chunk
        margin = beta * (ratio if kl is None else ratio - kl)
        # 1 - sig(z) as sig(-z), which is right for large z
        losses = torch.sigmoid(torch.where(preference_labels_chunk, -margin, margin))
        rewards = beta * ratio
        return (losses.sum() / max(full_target.shape[0], 1), torch.where(preference_labels_chunk, rewards, 0).sum(),
                torch.where(preference_labels_chunk, 0, rewards).sum())

    @staticmethod
    def _kl_of(kl, sequences):
        """`kl` as a number or (B,)."""
        if not isinstance(kl, torch.Tensor) or kl.dim() == 0:
            return kl
        if kl.numel() == 1 or tuple(kl.shape) in ((sequences,), (sequences, 1)):
            return kl.reshape(-1 if kl.numel() == sequences else ())
        raise ValueError(f"LigerFusedLinearKTOLoss: kl is {tuple(kl.shape)}, expected one element, ({sequences},) or ({sequences}, 1)")

    @classmethod
    def forward(cls, ctx, _input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None, kl=None,
                ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1):
        return LigerFusedLinearUnpairedPreferenceBase.forward(
            cls, ctx, _input, weight, target, preference_labels, bias, chunk_size, ignore_index, compiled, use_ref_model, ref_input,
            ref_weight, ref_bias, average_log_prob, beta=beta, kl=cls._kl_of(kl, target.shape[0]))


class LigerFusedLinearKTOLoss(torch.nn.Module):
    """The mean over sequences of 1 - sig(beta (r - kl) y), r the log-ratio to the reference model, y = 1 for desirable sequences and -1
    for others.

    Args:
        ignore_index, average_log_prob: as of :meth:`LigerFusedLinearUnpairedPreferenceBase.forward`.
        beta: factor of the rewards.
        use_ref_model: whether there is a reference model; without one r is the log-probability itself.
        compiled, chunk_size: accepted; nothing depends on them.
    """

    def __init__(self, ignore_index=-100, beta=0.1, compiled=True, use_ref_model=False, average_log_prob=False, chunk_size=1):
        super().__init__()
        self.ignore_index, self.beta, self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size = (
            ignore_index, beta, compiled, use_ref_model, average_log_prob, chunk_size)

    def forward(self, _input, lin_weight, target, bias=None, preference_labels=None, ref_input=None, ref_weight=None, ref_bias=None,
                kl=None):
        """-> (loss, (chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum, chosen_rewards_sum,
        rejected_rewards_sum)): sums over desirable and over undesirable sequences, rewards being beta r. The input comes first.

        `kl` is an estimate of the policy's divergence from the reference model, one element, (B,) or (B, 1); None: 0. The other arguments:
        :meth:`LigerFusedLinearUnpairedPreferenceBase.forward`. AssertionError without preference_labels."""
        assert preference_labels is not None, "LigerFusedLinearKTOLoss: preference_labels is None, expected (B,) bool"
        return call(
            LigerFusedLinearKTOFunction, _input, lin_weight, target, preference_labels, bias, ref_input, ref_weight, ref_bias, kl,
            self.ignore_index, self.beta, self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size)
