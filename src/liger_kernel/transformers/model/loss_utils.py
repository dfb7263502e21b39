"""Losses of causal language models. Other packages replace `LigerForCausalLMLoss` here and `liger_fused_linear_cross_entropy` in
`liger_kernel.transformers.functional`; both are looked up at every call."""

import inspect

import torch

from liger_kernel.ops import fused_linear_cross_entropy as _op
from liger_kernel.transformers import functional

_OWN = _op.liger_fused_linear_cross_entropy
_SET_HERE = {"input", "weight", "target", "ignore_index", "reduction", "softcap", "accum_dtype", "return_token_accuracy",
             "return_predicted_tokens"}
_OPTIONS = frozenset(inspect.signature(_OWN).parameters) - _SET_HERE


def shifted(labels, ignore_index=-100):
    """Labels as the targets of the positions before them: the first is dropped, one `ignore_index` follows the last."""
    return torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def unpack_cross_entropy_result(result):
    """(loss, z_loss, token_accuracy, predicted_tokens) of a CrossEntropyOutput, a tuple or a loss; what is missing is None."""
    if isinstance(result, functional.CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    if isinstance(result, tuple):
        return (*result, None, None, None)[:4]
    return result, None, None, None


def _per_item(result, num_items_in_batch):
    """A summed loss over the number of items; accuracy and predictions stay those of this batch."""
    loss, z_loss, accuracy, predicted = unpack_cross_entropy_result(result)
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    loss = loss / num_items_in_batch
    if torch.is_tensor(result):
        return loss
    z_loss = None if z_loss is None else z_loss / num_items_in_batch
    return functional.CrossEntropyOutput(loss=loss, z_loss=z_loss, token_accuracy=accuracy, predicted_tokens=predicted)


def fixed_fused_linear_cross_entropy(hidden_states, lm_head_weight, target, num_items_in_batch=None, ignore_index=-100,
                                     final_logit_softcapping=None, accum_dtype=None, return_token_accuracy=False,
                                     return_predicted_tokens=False, **kwargs):
    """Fused linear cross entropy of hidden states (rows, H), head weight (V, H) and targets (rows,): their mean, or their sum over
    `num_items_in_batch` when that is given. Keywords that the fused loss does not know are dropped.

    Returns:
        The loss, or a CrossEntropyOutput when accuracy or predictions are asked for.
    """
    logit_scale, stats = kwargs.pop("logit_scale", None), kwargs.pop("label_stats", None)
    options = {name: value for name, value in kwargs.items() if name in _OPTIONS}
    options.update(reduction="mean" if num_items_in_batch is None else "sum", ignore_index=ignore_index, softcap=final_logit_softcapping,
                   accum_dtype=accum_dtype, return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens)
    loss_function = functional.liger_fused_linear_cross_entropy
    if loss_function is _OWN:
        scale = 1.0 if logit_scale is None else logit_scale
        options.update(logit_scale=scale, label_stats=stats)
        loss, *others = _op.fused_linear_cross_entropy(hidden_states, lm_head_weight, target, **options)
        result = loss if all(other is None for other in others) else functional.CrossEntropyOutput(loss, *others)
    else:  # someone's replacement, which knows the public arguments only
        if logit_scale is not None:
            hidden_states = hidden_states * logit_scale
            if options.get("bias") is not None:
                options["bias"] = options["bias"] * logit_scale
        result = loss_function(hidden_states, lm_head_weight, target, **options)
    return result if num_items_in_batch is None else _per_item(result, num_items_in_batch)


def LigerForCausalLMLoss(hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100,
                         shift_labels=None, final_logit_softcapping=None, return_token_accuracy=False, return_predicted_tokens=False,
                         **kwargs):
    """The loss of a causal language model from its last hidden states, without logits.

    Args:
        hidden_states: (..., hidden_size), any strides.
        lm_head_weight: (V, hidden_size).
        labels: (batch, length) token ids; position t is trained on labels[t + 1]. Unused when `shift_labels` is given.
        num_items_in_batch: divisor of the summed loss, an int or a 0-dim tensor; None for the mean.
        shift_labels: targets that are shifted already.
        final_logit_softcapping: c in c tanh(logit / c), or None.
        **kwargs: options of the fused loss; others are dropped.

    Returns:
        The fp32 loss, or a CrossEntropyOutput when accuracy or predictions are asked for.
    """
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    hidden_states = hidden_states.reshape(-1, hidden_size)
    target = shift_labels.reshape(-1).to(hidden_states.device)
    return fixed_fused_linear_cross_entropy(
        hidden_states, lm_head_weight, target, num_items_in_batch, ignore_index, final_logit_softcapping,
        return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens, **kwargs)


def liger_causal_lm_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, label_smoothing=0.0,
                         lse_square_scale=0.0, ce_weight=None, use_token_scaling=False, return_token_accuracy=False,
                         return_predicted_tokens=False, **kwargs):
    """transformers' ForCausalLMLoss with our cross entropy, in fp32; a `loss_function` for models that keep their logits.

    The options from `label_smoothing` on are those of the fused loss. Other keywords are for other losses and are dropped.
    """
    if shift_labels is None:
        shift_labels = shifted(labels, ignore_index)
    rows = logits.reshape(-1, vocab_size)
    target = shift_labels.reshape(-1).to(logits.device)
    wide = rows.float()
    reduction = "none" if use_token_scaling else "mean" if num_items_in_batch is None else "sum"
    result = functional.liger_cross_entropy(
        wide, target, ce_weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        lse_square_scale=0.0 if use_token_scaling else lse_square_scale, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens)
    if use_token_scaling:
        result = _token_scaled(result, wide, target, ignore_index, ce_weight, lse_square_scale, num_items_in_batch is None)
    return result if num_items_in_batch is None else _per_item(result, num_items_in_batch)


def _token_scaled(result, logits, target, ignore_index, ce_weight, lse_square_scale, mean):
    """Per-row losses, and lse_square_scale lse^2, times the probability of the row's target, summed; for the mean, losses are
    divided by the weight (or count) of the valid targets, and squares by their count."""
    loss, _, accuracy, predicted = unpack_cross_entropy_result(result)
    valid = target != ignore_index
    index = target.where(valid, 0)
    lse = logits.logsumexp(-1)
    probability = (logits.gather(1, index[:, None])[:, 0] - lse).exp().detach().where(valid, 0)
    total, squares = (loss * probability).sum(), (lse_square_scale * lse.square() * probability).sum()
    if mean:
        total = total / (valid.sum() if ce_weight is None else ce_weight.to(total)[index].where(valid, 0).sum()).clamp(min=1e-30)
        squares = squares / valid.sum().clamp(min=1)
    if lse_square_scale:
        total = total + squares
    if torch.is_tensor(result):
        return total
    accuracy = None if accuracy is None else accuracy.sum() / valid.sum().clamp(min=1)
    return functional.CrossEntropyOutput(loss=total, token_accuracy=accuracy, predicted_tokens=predicted)
