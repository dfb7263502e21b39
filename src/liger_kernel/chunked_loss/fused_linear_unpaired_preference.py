"""Losses of single sequences that are desirable or not: what KTO is made of."""

import torch

from liger_kernel.chunked_loss.sequences import (
    check_reference,
    keep,
    kept,
    logit_sums,
    loss_and_gradients,
    part_of,
    pick_inputs,
    sequence_log_probs,
)
from liger_kernel.ops.fused_linear_log_probs import fused_linear_log_probs

EXPORTS = ["LigerFusedLinearUnpairedPreferenceBase"]


class LigerFusedLinearUnpairedPreferenceBase(torch.autograd.Function):
    """Base of losses of single sequences. A subclass defines `preference_loss_fn`, and a `forward` and `backward` that call these ones,
    as of :class:`LigerFusedLinearPreferenceBase`."""

    @classmethod
    def apply(cls, *arguments):
        return super().apply(*pick_inputs(arguments))

    @staticmethod
    def preference_loss_fn(*args, **kwargs):
        """(log_probs (B,), preference_labels (B,) bool, full_target (B, T), ref_log_prob_chunk=(B,) where there is a reference model,
        options) -> the loss, or (loss, *metrics).

        The loss and 0-dim metrics are divided by numbers of the whole batch (full_target.shape[0]); metrics of one element a sequence
        come back in the order of the sequences."""
        raise NotImplementedError("LigerFusedLinearUnpairedPreferenceBase: a subclass has to define preference_loss_fn")

    @staticmethod
    def forward(
        cls, ctx,  # noqa: PLW0211 - subclasses hand on both, also by keyword
        _input, weight, target, preference_labels, bias=None, chunk_size=1, ignore_index=-100, compiled=True, use_ref_model=False,
        ref_input=None, ref_weight=None, ref_bias=None, average_log_prob=False, **loss_kwargs,
    ):
        """Loss and metrics of B sequences; gradients for backward.

        Args:
            cls: the class whose `preference_loss_fn` counts.
            ctx: autograd's; None: the loss is made of operations that autograd differentiates.
            _input: (B, T, H), fp32, bf16 or fp16, any strides.
            weight: (V, H). Under autocast both are used in its dtype, otherwise in the wider of the two.
            target: (B, T) integers, already shifted.
            preference_labels: (B,) bool, True for desirable sequences.
            bias: (V,) or None.
            chunk_size, compiled: accepted; results and memory do not depend on them, and there is nothing to compile.
            ignore_index: target of tokens that count for nothing.
            use_ref_model, ref_input, ref_weight, ref_bias: log-probabilities of the reference model, from (B, T, H'), (V, H') and (V,)
                or None, are handed to `preference_loss_fn`.
            average_log_prob: sequences' log-probabilities are means over their valid tokens, not sums.
            loss_kwargs: handed to `preference_loss_fn`; with one element a sequence where a tensor has B.

        Returns:
            (loss, (chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum, *metrics of `preference_loss_fn`)),
            fp32 scalars: sums over desirable and over undesirable sequences of log-probabilities, and of all logits (all positions,
            all of the vocabulary).

        Raises:
            AssertionError: a target out of range.
            ValueError: shapes that do not fit; use_ref_model without ref_input and ref_weight.
        """
        name = cls.__name__
        if _input.dim() != 3 or target.shape != _input.shape[:2] or preference_labels.shape != target.shape[:1]:
            raise ValueError(f"{name}: _input is {tuple(_input.shape)}, target {tuple(target.shape)} and preference_labels "
                             f"{tuple(preference_labels.shape)}, expected (B, T, H), (B, T) and (B,)")
        count, desirable, valid = target.shape[0], preference_labels.bool(), target != ignore_index
        if use_ref_model:
            if ref_input is None or ref_weight is None:
                raise ValueError(f"{name}: use_ref_model is set, but {'ref_input' if ref_input is None else 'ref_weight'} is None; pass "
                                 "both, or use_ref_model=False")
            check_reference(name, ref_input, target)
            with torch.no_grad():
                ref_logp = fused_linear_log_probs(ref_input, ref_weight, target, ref_bias, ignore_index=ignore_index).logp
                loss_kwargs |= {"ref_log_prob_chunk": sequence_log_probs(ref_logp, valid, average_log_prob)}

        def sums(values, labels):
            return torch.where(labels, values, 0).sum(), torch.where(labels, 0, values).sum()

        def part(logp, begin, end):
            logps = sequence_log_probs(logp[:, 0], valid[begin:end], average_log_prob)
            labels = desirable[begin:end]
            loss = cls.preference_loss_fn(logps, labels, target, **part_of(loss_kwargs, begin, end, count))
            loss, *metrics = loss if isinstance(loss, (tuple, list)) else (loss,)
            return loss, tuple(m.detach() if isinstance(m, torch.Tensor) else m for m in (*sums(logps, labels), *metrics))

        x, labels = _input.unsqueeze(1), target.unsqueeze(1)
        if ctx is None:
            loss, metrics = part(fused_linear_log_probs(x, weight, labels, bias, ignore_index=ignore_index).logp, 0, count)
        else:
            loss, metrics, dx, dw, db = loss_and_gradients(part, x, weight, labels, bias, (_input, weight, bias), ignore_index,
                                                           getattr(cls.preference_loss_fn, "per_group", False))
            keep(ctx, (None if dx is None else dx.view(_input.shape), dw, db), (_input, weight, bias))
        return loss, (*metrics[:2], *sums(logit_sums(_input, weight, bias), desirable), *metrics[2:])

    @staticmethod
    def backward(ctx, *grad_output):
        """-> gradients of (_input, weight, target, preference_labels, bias), and None for every further argument of `apply`."""
        dx, dw, db = kept(ctx, grad_output)
        return (dx, dw, None, None, db) + (None,) * (len(ctx.needs_input_grad) - 5)
