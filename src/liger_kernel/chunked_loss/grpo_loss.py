"""GRPO and its relatives (BNPO, Dr. GRPO, DAPO, LUSPO, CISPO, SAPO, VESPO) on a linear head's hidden states, without the logits.

Where a token's loss depends on its own log-probability alone, a chunk of tokens has its logits made, their losses and derivatives found
and the gradients formed from the same logits: three products. Where it depends on the sequence (sequence-level ratios, VESPO's
weights), the chunk is whole sequences, or, when one is too long for that, the logits are made twice, in tiles of the vocabulary: four
products."""


import torch

from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase, check_inputs, read_ids, reference_log_probs
from liger_kernel.chunked_loss.sequences import call, keep
from liger_kernel.core.tensors import has_values
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.fused_linear_log_probs import log_probs_and_gradients, log_probs_and_gradients_in_tiles
from liger_kernel.ops.grpo_loss.terms import (
    LEVELS,
    Batch,
    Options,
    check_importance,
    d_logp,
    get_gamma_weights,
    sequence_weights,
    vector,
)

EXPORTS = ["LigerFusedLinearGRPOFunction", "LigerFusedLinearGRPOLoss", "clip_coef_fn", "get_gamma_weights", "k3_loss_fn", "sapo_loss_fn"]

_NAME = "LigerFusedLinearGRPOLoss"
# Most bytes of logits of one sequence that are held for the sake of the third product; beyond, tiles.
_CUDA_BYTES, _CPU_BYTES, _CPU_ROWS = 2 << 30, 64 << 20, 128


def k3_loss_fn(log_p, log_q):
    """Schulman's third estimator of KL(Q || P) from samples of Q: e^k - k - 1, k = log p - log q; elementwise, never negative."""
    k = log_p - log_q
    return torch.exp(k) - k - 1.0


def sapo_loss_fn(importance_ratio, temperature):
    """SAPO's soft gate, (4 / temperature) sigmoid(temperature (ratio - 1)); its slope at 1 is 1. ValueError for a temperature <= 0."""
    if temperature <= 0:
        raise ValueError(f"sapo_loss_fn: temperature is {temperature}, expected a positive number")
    return torch.sigmoid(temperature * (importance_ratio - 1)) * 4 / temperature


def clip_coef_fn(coef, epsilon_low, epsilon_high, loss_type):
    """(clipped ratio, below the lower bound, above the upper bound). cispo: bounded above by epsilon_high itself, without gradient;
    sapo and vespo: (None, all False, all False); else bounded to [1 - epsilon_low, 1 + epsilon_high]."""
    none = torch.zeros_like(coef, dtype=torch.bool)
    if loss_type == "cispo":
        return coef.clamp(max=epsilon_high).detach(), none, coef > epsilon_high
    if loss_type in ("sapo", "vespo"):
        return None, none, none
    low, high = 1 - epsilon_low, 1 + epsilon_high
    return coef.clamp(low, high), coef < low, coef > high


def _options(importance_sampling_level, loss_type, **more):
    if importance_sampling_level not in LEVELS:
        raise ValueError(f"{_NAME}: unknown importance_sampling_level {importance_sampling_level!r}, expected one of {', '.join(LEVELS)}")
    options = Options(loss_type, importance_sampling_level, **more)
    options.check(_NAME)
    return options


def _weights(loss_type, mask, max_completion_length, num_items_in_batch, once_a_sequence):
    """(weights of the sequences' summed losses, whether the losses are masked). luspo's sum counts masked tokens too, unless a sequence
    has one loss only."""
    if loss_type == "luspo" and once_a_sequence:
        return torch.full((mask.shape[0], 1), 1 / max(mask.shape[0], 1), device=mask.device), True
    return sequence_weights(loss_type, mask, max_completion_length, num_items_in_batch), loss_type != "luspo"


class _Coefficients:
    """The `coefficients` argument of :func:`log_probs_and_gradients`: sums of the terms, and the loss's derivatives."""

    def __init__(self, batch, weights, masked, want):
        self.batch, self.weights, self.masked, self.want, self.parts = batch, weights, masked, want, []

    def __call__(self, begin, end, chunk):
        terms = self.batch.terms(chunk.logp, begin, self.masked)
        weights, mask = self.weights[begin:end], self.batch.mask[begin:end]

        def total(t):
            return t.sum() if self.masked else torch.where(mask != 0, t, 0.0).sum()

        self.parts.append(torch.stack([(terms.loss * weights).sum(), *map(total, (terms.clipped,) if terms.kl is None else (
            terms.kl, terms.clipped))]))
        return d_logp(terms.slope, terms.ratio_slope, weights, mask, self.batch.length) if self.want else None


class LigerFusedLinearGRPOFunction(LigerFusedLinearPPOBase):
    """`apply(_input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
    old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, beta=0.04, epsilon_low=0.2, epsilon_high=0.2,
    loss_type="dapo", max_completion_length=None, importance_sampling_level="token", sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05, temperature=1.0, compiled=True, use_ref_model=True, chunk_size=1, vllm_is_ratio=None, delta=None,
    use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    num_items_in_batch=None)` -> (loss, metrics); see :class:`LigerFusedLinearGRPOLoss`.

    A subclass with another `ppo_loss_fn` goes through the base's general form."""

    @staticmethod
    def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, ref_per_token_logps=None, old_per_token_logps=None,
                    epsilon_low=0.2, epsilon_high=0.2, beta=0.04, loss_type="dapo", max_completion_length=None,
                    importance_sampling_level="token", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None,
                    use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
                    num_items_in_batch=None, **kwargs):
        """(loss, [mean KL for beta other than 0, clip ratio]) of some sequences' log-probabilities (b, T), in operations that autograd
        differentiates; divided by numbers of the whole batch, whose mask (B, T) is `full_attention_mask`.

        Raises:
            ValueError: unknown loss_type or level; sequence level with cispo, sapo or vespo; dr_grpo without max_completion_length.
            AssertionError: a shape of vllm_is_ratio other than (b,), (b, 1) and (b, T).
        """
        _options(importance_sampling_level, loss_type)
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError(f"{_NAME}: dr_grpo needs max_completion_length")
        check_importance(_NAME, vllm_is_ratio, *per_token_logps.shape)
        logp, mask, advantages = per_token_logps, attention_mask, advantages.reshape(-1, 1)
        ratio = vllm_is_ratio if vllm_is_ratio is None or vllm_is_ratio.dim() == 2 else vllm_is_ratio.unsqueeze(1)
        log_ratio = logp - (logp.detach() if old_per_token_logps is None else old_per_token_logps)
        log_weights = log_ratio
        if importance_sampling_level == "sequence":
            log_weights = ((log_ratio * mask).sum(1) / mask.sum(1).clamp(min=1.0)).unsqueeze(1)
        coef = log_weights.exp()
        clipped, below, above = clip_coef_fn(coef, epsilon_low, epsilon_high, loss_type)
        is_clipped = (below & (advantages < 0)) | (above & (advantages > 0))
        if loss_type == "cispo":
            loss = -clipped * advantages * logp
        elif loss_type == "sapo":
            loss = -advantages * torch.where(advantages > 0, sapo_loss_fn(coef, sapo_temperature_pos),
                                             sapo_loss_fn(coef, sapo_temperature_neg))
        elif loss_type == "vespo":
            loss = -get_gamma_weights(advantages, log_ratio, mask, ratio, vespo_k_pos, vespo_lambda_pos, vespo_k_neg,
                                      vespo_lambda_neg) * advantages * logp
        else:
            loss = -torch.min((coef if delta is None else coef.clamp(max=delta)) * advantages, clipped * advantages)
        if ratio is not None and loss_type != "vespo":
            loss = loss * ratio
        tokens = full_attention_mask.sum().clamp(min=1.0)
        metrics = []
        if beta != 0.0:
            kl = k3_loss_fn(logp.detach() if ref_per_token_logps is None else ref_per_token_logps, logp)
            kl = kl * coef if use_bias_correction_kl else kl
            loss = loss + beta * kl
            metrics.append(((kl * mask).sum() / tokens).detach())
        metrics.append((is_clipped.expand_as(logp) * mask).sum() / tokens)
        lengths = mask.sum(1, keepdim=True)
        if loss_type == "luspo":
            return (loss * lengths).sum() / (full_attention_mask.shape[0] * loss.shape[1]), metrics
        if loss_type in ("grpo", "sapo"):
            return (loss * mask / lengths.clamp(min=1.0)).sum() / full_attention_mask.shape[0], metrics
        weights = sequence_weights(loss_type, full_attention_mask, max_completion_length, num_items_in_batch)
        return (loss * mask).sum() * (weights if weights.dim() == 0 else weights[0, 0]), metrics

    @classmethod
    def forward(cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
                old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, beta=0.04, epsilon_low=0.2, epsilon_high=0.2,
                loss_type="dapo", max_completion_length=None, importance_sampling_level="token", sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05, temperature=1.0, compiled=True, use_ref_model=True, chunk_size=1, vllm_is_ratio=None, delta=None,
                use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
                num_items_in_batch=None):
        options = _options(importance_sampling_level, loss_type, beta=beta, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta,
                           use_bias_correction_kl=use_bias_correction_kl, sapo_temperature_pos=sapo_temperature_pos,
                           sapo_temperature_neg=sapo_temperature_neg)
        assert loss_type != "dr_grpo" or max_completion_length is not None, f"{_NAME}: dr_grpo needs max_completion_length"
        if ctx is None or cls.ppo_loss_fn is not LigerFusedLinearGRPOFunction.ppo_loss_fn:
            return LigerFusedLinearPPOBase.forward(
                cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps, old_per_token_logps,
                ref_input, ref_weight, ref_bias, epsilon_low, epsilon_high, beta, loss_type, max_completion_length,
                importance_sampling_level, temperature, compiled, use_ref_model, chunk_size, sapo_temperature_pos, sapo_temperature_neg,
                vllm_is_ratio, delta, use_bias_correction_kl, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg,
                num_items_in_batch)
        check_inputs(_NAME, _input, selected_token_ids, attention_mask, advantages, ref_per_token_logps, old_per_token_logps)
        sequences, length = selected_token_ids.shape
        check_importance(_NAME, vllm_is_ratio, sequences, length)
        per_token_ratio = vllm_is_ratio is not None and vllm_is_ratio.numel() != sequences
        weights, masked = _weights(loss_type, attention_mask, max_completion_length, num_items_in_batch,
                                   options.sequence_level and beta == 0 and not per_token_ratio)
        ids = read_ids(selected_token_ids, attention_mask, labels.NO_LABEL if masked else None)
        ref_logp = reference_log_probs(_NAME, ids, beta, use_ref_model, ref_per_token_logps, ref_input, ref_weight, ref_bias, temperature)
        gamma = {"k_pos": vespo_k_pos, "lambda_pos": vespo_lambda_pos, "k_neg": vespo_k_neg, "lambda_neg": vespo_lambda_neg}
        batch = Batch(options, length, vector(advantages), vector(old_per_token_logps), vector(ref_logp), vector(attention_mask),
                      vector(vllm_is_ratio), None, gamma)
        wanted = [t is not None and t.requires_grad for t in (_input, weight, bias)]
        loss = _Coefficients(batch, vector(weights.expand(sequences, length)), masked, any(wanted))
        arguments = dict(zip(("want_dx", "want_dw", "want_db"), wanted, strict=True), temperature=temperature,
                         ignore_index=labels.NO_LABEL)
        flat = _input.reshape(-1, _input.shape[-1])
        group = length if batch.by_sequence else 1
        if any(wanted) and selected_token_ids.numel() and _in_chunks(_input, weight, group):
            _, *gradients = log_probs_and_gradients(flat, weight, ids.reshape(-1), loss, bias, group=group, **arguments)
        else:
            _, *gradients = log_probs_and_gradients_in_tiles(flat, weight, ids.reshape(-1), loss, bias, **arguments)
        dx, dw, db = gradients
        keep(ctx, (None if dx is None else dx.view(_input.shape), dw, db), (_input, weight, bias))
        total, *metrics = torch.stack(loss.parts).sum(0).unbind()
        tokens = attention_mask.sum(dtype=torch.float32).clamp(min=1.0)
        return total, tuple(m / tokens for m in metrics)

    @staticmethod
    def backward(ctx, *grad_output):
        return LigerFusedLinearPPOBase.backward(ctx, *grad_output)


def _in_chunks(x, weight, rows):
    """Whether the logits of groups of `rows` tokens may be held, for the sake of the third product. On the CPU 16-bit weights go in
    tiles: their gradient then needs no fp32 copy of itself, and the fourth product is quick."""
    if not has_values(x):
        return rows == 1
    if not x.is_cuda and weight.requires_grad and weight.dtype != torch.float32:
        return False
    size = rows * weight.shape[0] * (x.element_size() if x.is_cuda else 4)
    return size <= _CUDA_BYTES if x.is_cuda else rows <= _CPU_ROWS or size <= _CPU_BYTES


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """Policy-gradient loss of completions' hidden states and a linear head, without the logits.

    logp = log_softmax((x W^T + b) / temperature) at the ids; d = logp - old, r = e^d per token, or at sequence level one ratio a
    sequence, the exponential of the masked mean of d. A is the advantage. Per token:

        grpo, bnpo, dr_grpo, dapo, luspo   -min(min(r, delta) A, clamp(r, 1 - epsilon_low, 1 + epsilon_high) A)
        cispo                              -min(r, epsilon_high) A logp, the ratio a constant
        sapo                               -A (4 / tau) sigmoid(tau (r - 1)), tau = sapo_temperature_pos where A > 0, else _neg
        vespo                              -phi A logp, phi = w^k e^(lambda (1 - w)), a constant; see get_gamma_weights

    times vllm_is_ratio (vespo: inside w), plus beta (e^k - k - 1), k = ref - logp, the latter times r with use_bias_correction_kl.
    The reduction: grpo and sapo the mean over sequences of their masked means; bnpo the mean over tokens; dr_grpo the sum over (B
    max_completion_length); dapo, cispo and vespo the sum over the tokens of the global batch per process; luspo the mean over sequences
    of their mean loss times their length.

    Args:
        beta: factor of the KL term.
        compiled, chunk_size: accepted; results and memory do not depend on them, and there is nothing to compile.
        use_ref_model: log-probabilities of a reference model are wanted: given, or made from ref_input and ref_weight.
        delta: upper bound of the ratio that is not clipped, or None.
        The others: above.

    Raises:
        ValueError: a sapo temperature <= 0; a delta <= 0.
    """

    def __init__(self, beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2, epsilon_high=0.2, loss_type="dapo",
                 max_completion_length=None, importance_sampling_level="token", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
                 temperature=1.0, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
                 vespo_lambda_neg=2.0):
        super().__init__()
        if sapo_temperature_pos <= 0 or sapo_temperature_neg <= 0:
            raise ValueError(f"{_NAME}: sapo temperatures are {sapo_temperature_pos} and {sapo_temperature_neg}, expected positive numbers")
        if delta is not None and delta <= 0:
            raise ValueError(f"{_NAME}: delta is {delta}, expected a positive number or None")
        self.beta, self.compiled, self.use_ref_model, self.chunk_size = beta, compiled, use_ref_model, chunk_size
        self.epsilon_low, self.epsilon_high, self.loss_type, self.max_completion_length = (
            epsilon_low, epsilon_high, loss_type, max_completion_length)
        self.importance_sampling_level, self.sapo_temperature_pos, self.sapo_temperature_neg, self.temperature = (
            importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg, temperature)
        self.delta, self.use_bias_correction_kl = delta, use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg = (
            vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)

    def forward(self, _input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
                old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, vllm_is_ratio=None, num_items_in_batch=None):
        """Args:
            _input: (B, T, H) hidden states of the completions, fp32, bf16 or fp16, any strides.
            lin_weight: (V, H). Under autocast both are used in its dtype, otherwise in the wider of the two.
            selected_token_ids: (B, T) integers.
            attention_mask: (B, T), 0 where a token counts for nothing, else 1; any dtype.
            advantages: (B,).
            bias: (V,) or None.
            ref_per_token_logps, old_per_token_logps: (B, T) or None. old None: the current ones, r = 1 with a gradient.
            ref_input, ref_weight, ref_bias: (B, T, H'), (V, H'), (V,) or None.
            vllm_is_ratio: (B,), (B, 1) or (B, T) importance weights between sampler and trainer, or None.
            num_items_in_batch: tokens of the global batch, int or tensor; None: the masks' sum over all processes.

        Returns:
            (loss, metrics): the loss an fp32 scalar, the metrics (mean KL where beta is not 0, clip ratio), without gradient.
            Gradients go to _input, lin_weight and bias, made in forward for those that require one.

        Raises:
            AssertionError: use_ref_model without a reference; dr_grpo without max_completion_length; a wrong shape of vllm_is_ratio; a
                token out of range (not under torch.compile or graph capture: NaN).
            ValueError: unknown loss_type or level; sequence level with cispo, sapo or vespo; other shapes that do not fit.
        """
        return call(
            LigerFusedLinearGRPOFunction, _input, lin_weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, self.beta, self.epsilon_low, self.epsilon_high, self.loss_type,
            self.max_completion_length, self.importance_sampling_level, self.sapo_temperature_pos, self.sapo_temperature_neg,
            self.temperature, self.compiled, self.use_ref_model, self.chunk_size, vllm_is_ratio, self.delta, self.use_bias_correction_kl,
            self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg, num_items_in_batch)

    def extra_repr(self):
        return f"loss_type={self.loss_type!r}, beta={self.beta}, importance_sampling_level={self.importance_sampling_level!r}"
