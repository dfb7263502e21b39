"""Losses of pairs of sequences, a chosen and a rejected one: what DPO, CPO, ORPO and SimPO share."""

import torch
import torch.nn.functional as F

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
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.fused_linear_log_probs import fused_linear_log_probs, log_probs_and_gradients_in_tiles

EXPORTS = ["LigerFusedLinearPreferenceBase"]


class LigerFusedLinearPreferenceBase(torch.autograd.Function):
    """Base of losses of pairs. A subclass defines `preference_loss_fn`, and a `forward` and `backward` that call these ones:

        class Mine(LigerFusedLinearPreferenceBase):
            @staticmethod
            def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1):
                return -F.logsigmoid(beta * (chosen_logps - rejected_logps)).sum() / (full_target.shape[0] // 2)

            @classmethod
            def forward(cls, ctx, _input, weight, target, bias=None, beta=0.1):
                return LigerFusedLinearPreferenceBase.forward(cls, ctx, _input, weight, target, bias, beta=beta)

            @staticmethod
            def backward(ctx, *grad_output):
                return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], None

    The loss is alpha * NLL + preference_loss_fn(...); its gradients are made in forward, and backward, which does not read the weight,
    multiplies them by the upstream gradient. Under torch.compile autograd differentiates the same formulas instead.
    """

    @classmethod
    def apply(cls, *arguments):
        return super().apply(*pick_inputs(arguments))

    @staticmethod
    def preference_loss_fn(*args, **kwargs):
        """(chosen_logps (n,), rejected_logps (n,), full_target (B, T), [ref_chosen_logps, ref_rejected_logps (n,),] beta=..., options)
        -> the loss, or (loss, *metrics).

        The log-probabilities are fp32, one a sequence. The loss and 0-dim metrics are divided by the n = B / 2 pairs of the whole batch
        (full_target.shape[0] // 2); metrics of one element a pair come back in the order of the pairs."""
        raise NotImplementedError("LigerFusedLinearPreferenceBase: a subclass has to define preference_loss_fn")

    @staticmethod
    def chunk_forward(input_chunk, weight, target_chunk, bias=None, ignore_index=-100, compute_nll_loss=True, chosen_nll_target_chunk=None,
                      average_log_prob=True):
        """Log-probabilities of some pairs in plain PyTorch, with their logits; the losses do not go through it.

        Args:
            input_chunk: (2 k, T, H), the chosen sequences first.
            target_chunk: (2 k, T).
            chosen_nll_target_chunk: (k, T), targets of the NLL term in place of the chosen sequences'.

        Returns:
            (chosen_logps (k,), rejected_logps (k,), chosen_logits (k, T, V), rejected_logits, the sum of the chosen tokens' -log p)."""
        chosen = input_chunk.shape[0] // 2
        logits = F.linear(input_chunk, weight, bias)
        log_p = F.log_softmax(logits.float(), -1)

        def picked(log_p, target):
            logp = log_p.gather(-1, torch.where(target != ignore_index, target, 0)[..., None]).squeeze(-1)
            return torch.where(target != ignore_index, logp, 0)

        nll = log_p.new_zeros(())
        if compute_nll_loss:
            nll = -picked(log_p[:chosen], target_chunk[:chosen] if chosen_nll_target_chunk is None else chosen_nll_target_chunk).sum()
        logps = sequence_log_probs(picked(log_p, target_chunk), target_chunk != ignore_index, average_log_prob)
        return logps[:chosen], logps[chosen:], logits[:chosen], logits[chosen:], nll

    @staticmethod
    def forward(
        cls, ctx,  # noqa: PLW0211 - subclasses hand on both, also by keyword
        _input, weight, target, bias=None, chunk_size=1, ignore_index=-100, alpha=1.0, beta=0.1, compute_nll_loss=True, nll_target=None,
        compiled=True, use_ref_model=False, ref_input=None, ref_weight=None, ref_bias=None, average_log_prob=True, **loss_kwargs,
    ):
        """Loss and metrics of B / 2 pairs; gradients for backward.

        Args:
            cls: the class whose `preference_loss_fn` counts.
            ctx: autograd's; None: the loss is made of operations that autograd differentiates.
            _input: (B, T, H), fp32, bf16 or fp16, any strides: the chosen sequences, then the rejected ones; i and B / 2 + i are a pair.
            weight: (V, H). Under autocast both are used in its dtype, otherwise in the wider of the two.
            target: (B, T) integers, already shifted.
            bias: (V,) or None.
            chunk_size, compiled: accepted; results and memory do not depend on them, and there is nothing to compile.
            ignore_index: target of tokens that count for nothing.
            alpha: factor of the NLL term, which is the mean of -log p over the valid tokens of the chosen sequences.
            beta: handed to `preference_loss_fn`.
            nll_target: (B, T), targets of the NLL term in place of `target`.
            use_ref_model, ref_input, ref_weight, ref_bias: log-probabilities of the reference model, from (B, T, H'), (V, H') and (V,)
                or None, are handed to `preference_loss_fn`.
            average_log_prob: sequences' log-probabilities are means over their valid tokens, not sums.
            loss_kwargs: handed to `preference_loss_fn`; with one element a pair where a tensor has n.

        Returns:
            (loss, (chosen_logps (n,), rejected_logps (n,), chosen_logits_mean, rejected_logits_mean, nll_loss, *metrics of
            `preference_loss_fn`)), fp32. The means are over all positions and the vocabulary; nll_loss is without alpha. An ignored
            sequence has log-probability 0; without valid tokens nll_loss is 0.

        Raises:
            AssertionError: a target out of range.
            ValueError: shapes that do not fit; an odd B; use_ref_model without ref_input and ref_weight.
        """
        name = cls.__name__
        if _input.dim() != 3 or target.shape != _input.shape[:2] or target.shape[0] % 2:
            raise ValueError(f"{name}: _input is {tuple(_input.shape)} and target {tuple(target.shape)}, expected (B, T, H) and (B, T), "
                             "B even: the chosen sequences, then the rejected ones")
        n = target.shape[0] // 2
        if nll_target is not None and nll_target.shape not in (target.shape, (n, target.shape[1])):  # the chosen half is read
            raise ValueError(f"{name}: nll_target is {tuple(nll_target.shape)}, expected {tuple(target.shape)} as target")
        def pairs(t):  # (B, ...) -> (n, 2, ...)
            return t.unflatten(0, (2, n)).transpose(0, 1)

        x, read = pairs(_input), pairs(target)
        valid = read != ignore_index
        nll_valid, rest = valid[:, 0], None
        if compute_nll_loss and nll_target is not None:
            read, nll_valid, rest = _with_nll_targets(read, valid, nll_target, ignore_index)
        if rest is not None and labels.ask(rest.reshape(-1), weight.shape[0], ignore_index).count() == 0:
            rest = None
        tokens = nll_valid.sum() if rest is None else nll_valid.sum() + (rest != ignore_index).sum()
        tokens = tokens.clamp(min=1)
        if use_ref_model:
            if ref_input is None or ref_weight is None:
                raise ValueError(f"{name}: use_ref_model is set, but {'ref_input' if ref_input is None else 'ref_weight'} is None; pass "
                                 "both, or use_ref_model=False")
            check_reference(name, ref_input, target)
            with torch.no_grad():
                ref_logp = fused_linear_log_probs(pairs(ref_input), ref_weight, pairs(target), ref_bias, ignore_index=ignore_index).logp
                ref_chosen, ref_rejected = sequence_log_probs(ref_logp, valid, average_log_prob).unbind(1)
            loss_kwargs |= {"ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}

        def part(logp, begin, end):
            chosen, rejected = sequence_log_probs(logp, valid[begin:end], average_log_prob).unbind(1)
            nll = torch.where(nll_valid[begin:end], -logp[:, 0], 0).sum() / tokens if compute_nll_loss else logp.new_zeros(())
            loss = cls.preference_loss_fn(chosen, rejected, target, beta=beta, **part_of(loss_kwargs, begin, end, n))
            loss, *metrics = loss if isinstance(loss, (tuple, list)) else (loss,)
            return alpha * nll + loss, tuple(m.detach() if isinstance(m, torch.Tensor) else m for m in (chosen, rejected, nll, *metrics))

        if ctx is None:
            loss, metrics = part(fused_linear_log_probs(x, weight, read, bias, ignore_index=ignore_index).logp, 0, n)
            if rest is not None:
                rest_nll = -fused_linear_log_probs(x[:, 0], weight, rest, bias, ignore_index=ignore_index).logp.sum() / tokens
        else:
            loss, metrics, *gradients = loss_and_gradients(part, x, weight, read, bias, (_input, weight, bias), ignore_index,
                                                           getattr(cls.preference_loss_fn, "per_group", False))
            if rest is not None:
                rest_nll = _add_nll(gradients, x[:, 0], weight, rest, bias, alpha, tokens, ignore_index)
            dx, dw, db = gradients
            keep(ctx, (None if dx is None else dx.transpose(0, 1).reshape(_input.shape), dw, db), (_input, weight, bias))
        chosen, rejected, nll, *metrics = metrics
        if rest is not None:
            loss, nll = loss + alpha * rest_nll, nll + rest_nll.detach()
        sums = logit_sums(_input, weight, bias).unflatten(0, (2, n)).sum(1) / max(n * target.shape[1] * weight.shape[0], 1)
        return loss, (chosen, rejected, sums[0], sums[1], nll, *metrics)

    @staticmethod
    def backward(ctx, *grad_output):
        """-> gradients of (_input, weight, target, bias), and None for every further argument of `apply`."""
        dx, dw, db = kept(ctx, grad_output)
        return (dx, dw, None, db) + (None,) * (len(ctx.needs_input_grad) - 4)


def _with_nll_targets(read, valid, nll_target, ignore_index):
    """Targets for the pass over all tokens that serve the NLL term as well, as far as the two agree.

    A chosen token that `target` ignores is read for the NLL term alone (the prompt, usually). Where both want a token, but different
    targets, it needs a second log-probability.

    Returns:
        (targets (n, 2, T), which of the chosen ones count for the NLL term (n, T), the targets that are left over (n, T))."""
    nll = nll_target[: read.shape[0]]
    wanted = nll != ignore_index
    chosen = torch.where(valid[:, 0], read[:, 0], nll)
    shared = wanted & (chosen == nll)
    return torch.stack([chosen, read[:, 1]], 1), shared, torch.where(wanted & ~shared, nll, ignore_index)


def _add_nll(gradients, x, weight, target, bias, alpha, tokens, ignore_index):
    """The part of the NLL term of `target` (n, T), in which its gradients are added to those of all sequences, in place."""
    wanted = dict(zip(("want_dx", "want_dw", "want_db"), (g is not None for g in gradients), strict=True))
    factor = torch.full(target.shape, -float(alpha), dtype=torch.float32, device=x.device) / tokens
    results, dx, dw, db = log_probs_and_gradients_in_tiles(
        x, weight, target, lambda *_: factor, bias, ignore_index=ignore_index, **wanted)
    for total, added in zip((gradients[0] if dx is None else gradients[0][:, 0], *gradients[1:]), (dx, dw, db), strict=True):
        if added is not None:
            total += added
    return -results.logp.sum() / tokens
