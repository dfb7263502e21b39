"""Policy-gradient losses of a linear head's log-probabilities, without its logits: what the GRPO family and subclasses of other people
share."""

import warnings

import torch

from liger_kernel.chunked_loss.sequences import keep, kept, pick_inputs
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.fused_linear_log_probs import fused_linear_log_probs, log_probs_and_gradients_in_tiles
from liger_kernel.ops.grpo_loss.terms import check_importance, token_normalizer

EXPORTS = ["LigerFusedLinearPPOBase"]


def check_inputs(name, _input, ids, mask, advantages, ref_logp, old_logp):
    """ValueError unless the shapes are (B, T, H), (B, T), (B, T), (B,) or (B, 1), and (B, T) or None."""
    shape = tuple(_input.shape[:2])
    if _input.dim() != 3:
        raise ValueError(f"{name}: _input is {tuple(_input.shape)}, expected (B, T, H)")
    for what, t in (("selected_token_ids", ids), ("attention_mask", mask), ("ref_per_token_logps", ref_logp),
                    ("old_per_token_logps", old_logp)):
        if t is not None and t.shape != shape:
            raise ValueError(f"{name}: {what} is {tuple(t.shape)}, expected {shape} for _input {tuple(_input.shape)}")
    if tuple(advantages.shape) not in ((shape[0],), (shape[0], 1)):
        raise ValueError(f"{name}: advantages are {tuple(advantages.shape)}, expected ({shape[0]},)")


def read_ids(ids, mask, masked=None):
    """int64 ids whose log-probabilities are read: where `mask` is 0, `masked`, or, for sums that count those too, what is there, 0 for
    negative ones."""
    ids = labels.indices("fused_linear_log_probs", ids)
    return torch.where(mask != 0, ids, ids.clamp(min=0) if masked is None else masked)


def reference_log_probs(name, ids, beta, use_ref_model, ref_logp, ref_input, ref_weight, ref_bias, temperature):
    """Log-probabilities of the reference model (B, T): those given, or, where they are wanted, made from its hidden states.

    Raises:
        AssertionError: use_ref_model without either.
    """
    if ref_logp is not None:
        if ref_input is not None:
            warnings.warn(f"{name}: both ref_per_token_logps and ref_input are given; ref_per_token_logps are used", stacklevel=3)
        return ref_logp
    if not use_ref_model:
        return None
    assert ref_input is not None, f"{name}: use_ref_model needs ref_per_token_logps, or ref_input and ref_weight"
    assert ref_weight is not None, f"{name}: use_ref_model with ref_input needs ref_weight"
    if beta == 0:
        return None
    with torch.no_grad():
        return fused_linear_log_probs(ref_input, ref_weight, ids, ref_bias, temperature=temperature, ignore_index=labels.NO_LABEL).logp


class LigerFusedLinearPPOBase(torch.autograd.Function):
    """Base of losses of per-token log-probabilities. A subclass defines `ppo_loss_fn`, and a `forward` and `backward` that call these:

        class Mine(LigerFusedLinearPPOBase):
            @staticmethod
            def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, **options):
                loss = -(per_token_logps * advantages[:, None] * attention_mask).sum() / full_attention_mask.sum()
                return loss, []

            @classmethod
            def forward(cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias=None):
                return LigerFusedLinearPPOBase.forward(cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias)

            @staticmethod
            def backward(ctx, *grad_output):
                return LigerFusedLinearPPOBase.backward(ctx, *grad_output)

    The gradients are made in forward; backward multiplies them by the loss's upstream gradient and does not read the weight.
    """

    @classmethod
    def apply(cls, *arguments):
        return super().apply(*pick_inputs(arguments))

    @staticmethod
    def ppo_loss_fn(*args, **kwargs):
        """(per_token_logps (B, T) fp32, attention_mask, advantages, full_attention_mask, ref_per_token_logps, old_per_token_logps,
        options of :meth:`forward`, all by keyword) -> (scalar loss, list of metrics)."""
        raise NotImplementedError("LigerFusedLinearPPOBase: a subclass has to define ppo_loss_fn")

    @staticmethod
    def chunk_forward(input_chunk, weight, selected_token_ids, bias=None, temperature=1.0):
        """Log-probabilities (B, T) in fp32 of the ids under (input_chunk weight^T + bias) / temperature; differentiable.

        Args:
            input_chunk: (B, T, H).
            weight: (V, H).
            selected_token_ids: (B, T) integers; negative ones are taken for 0.
            bias: (V,) or None.
        """
        return fused_linear_log_probs(input_chunk, weight, selected_token_ids.clamp(min=0), bias, temperature=temperature,
                                      ignore_index=-1).logp

    @staticmethod
    def _compute_dapo_normalizer(attention_mask, num_items_in_batch=None):
        """What dapo, cispo and vespo divide by, at least 1: `num_items_in_batch`, or the masks' sum over all processes, divided by
        their number."""
        return token_normalizer(attention_mask, num_items_in_batch)

    @staticmethod
    def forward(
        cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias=None,  # noqa: PLW0211 - subclasses hand on cls
        ref_per_token_logps=None, old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, epsilon_low=0.2,
        epsilon_high=0.2, beta=0.04, loss_type="dapo", max_completion_length=None, importance_sampling_level="token", temperature=1.0,
        compiled=True, use_ref_model=False, chunk_size=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vllm_is_ratio=None,
        delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        num_items_in_batch=None):
        """(loss, tuple of metrics) of `cls.ppo_loss_fn`, which is called once, for the whole batch; gradients for backward.

        Log-probabilities are made in tiles of the vocabulary, and the logits again for the gradients. `chunk_size` and `compiled` are
        accepted: results and memory do not depend on them. With ctx None (under torch.compile) the loss is made of operations that
        autograd differentiates. See :class:`liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` for the rest.
        """
        name = cls.__name__
        check_inputs(name, _input, selected_token_ids, attention_mask, advantages, ref_per_token_logps, old_per_token_logps)
        check_importance(name, vllm_is_ratio, *selected_token_ids.shape)
        ids = read_ids(selected_token_ids, attention_mask)
        ref_logp = reference_log_probs(name, ids, beta, use_ref_model, ref_per_token_logps, ref_input, ref_weight, ref_bias, temperature)
        options = {
            "attention_mask": attention_mask, "advantages": advantages, "full_attention_mask": attention_mask,
            "ref_per_token_logps": ref_logp, "old_per_token_logps": old_per_token_logps, "epsilon_low": epsilon_low,
            "epsilon_high": epsilon_high, "beta": beta, "loss_type": loss_type, "max_completion_length": max_completion_length,
            "importance_sampling_level": importance_sampling_level, "sapo_temperature_pos": sapo_temperature_pos,
            "sapo_temperature_neg": sapo_temperature_neg, "vllm_is_ratio": vllm_is_ratio, "delta": delta,
            "use_bias_correction_kl": use_bias_correction_kl, "vespo_k_pos": vespo_k_pos, "vespo_lambda_pos": vespo_lambda_pos,
            "vespo_k_neg": vespo_k_neg, "vespo_lambda_neg": vespo_lambda_neg, "num_items_in_batch": num_items_in_batch,
        }
        if ctx is None:
            loss, metrics = cls.ppo_loss_fn(
                per_token_logps=LigerFusedLinearPPOBase.chunk_forward(_input, weight, ids, bias, temperature), **options)
            return loss, tuple(metrics)
        wanted = [t is not None and t.requires_grad for t in (_input, weight, bias)]
        found = []

        def coefficients(begin, end, results):
            logp = results.logp.view(ids.shape).detach().requires_grad_(any(wanted))
            with torch.set_grad_enabled(any(wanted)):
                loss, metrics = cls.ppo_loss_fn(per_token_logps=logp, **options)
                gradient = torch.autograd.grad(loss, logp, allow_unused=True)[0] if loss.requires_grad else None
            found.extend((loss.detach(), tuple(m.detach() if isinstance(m, torch.Tensor) else m for m in metrics)))
            return gradient

        _, *gradients = log_probs_and_gradients_in_tiles(
            _input, weight, ids, coefficients, bias, temperature=temperature, ignore_index=labels.NO_LABEL,
            **dict(zip(("want_dx", "want_dw", "want_db"), wanted, strict=True)))
        keep(ctx, gradients, (_input, weight, bias))
        return tuple(found)

    @staticmethod
    def backward(ctx, *grad_output):
        """-> gradients of (_input, weight, None, None, None, bias), and None for every further argument of `apply`."""
        dx, dw, db = kept(ctx, grad_output)
        gradients = (dx, dw, None, None, None, db)
        return gradients[: len(ctx.needs_input_grad)] + (None,) * (len(ctx.needs_input_grad) - 6)
