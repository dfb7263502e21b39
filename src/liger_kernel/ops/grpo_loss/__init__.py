"""GRPO and its relatives on logits that exist already: log-probabilities in one pass over the logits, the losses of all tokens in one
launch, the gradient in a second pass, which may overwrite the logits.

Where the head's weight is at hand, :class:`liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` makes no logits at all."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only, without_gradient
from liger_kernel.core.tensors import check_dtypes, gather_dtensor
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.grpo_loss.terms import (
    CLIPPED,
    LEVELS,
    Batch,
    Options,
    check_importance,
    d_logp,
    sequence_weights,
    vector,
)
from liger_kernel.ops.selective_log_softmax import (
    check_range,
    check_temperature,
    completion_targets,
    fused_selective_log_softmax,
    gradient,
)

EXPORTS = ["GrpoLossFunction"]
__all__ = ["GrpoLossFunction", "fused_selective_log_softmax", "triton_grpo_loss"]

_OP = "grpo_loss"


def _check_tensors(logits, old_logp, ref_logp, ids, advantages, mask, beta):
    assert beta == 0.0 or ref_logp is not None, f"{_OP}: ref_logp is None; beta {beta} needs the reference model's log-probabilities"
    tensors = {"logits": logits, "completion_ids": ids, "old_logp": old_logp, "ref_logp": ref_logp, "completion_mask": mask}
    for name, t in tensors.items():
        assert t is None or t.is_contiguous(), f"{_OP}: {name} has strides {t.stride()}, expected a contiguous tensor"
    check_dtypes(_OP, logits)
    if logits.dim() != 3 or logits.shape[1] < 1:
        raise ValueError(f"{_OP}: logits are {tuple(logits.shape)}, expected (B, L + 1, V)")
    shape = (logits.shape[0], logits.shape[1] - 1)
    for name, t in list(tensors.items())[1:]:
        if t is not None and t.shape != shape:
            raise ValueError(f"{_OP}: {name} is {tuple(t.shape)}, expected {shape} for logits {tuple(logits.shape)}")
    if advantages.numel() != shape[0]:
        raise ValueError(f"{_OP}: advantages are {tuple(advantages.shape)}, expected ({shape[0]},)")


class GrpoLossFunction(torch.autograd.Function):
    """`apply(logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, beta, eps_low, eps_high, inplace,
    loss_type="grpo", max_completion_length=None, reduce=True, importance_sampling_level="token", sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, num_items_in_batch=None, phi_seq=None)`
    -> (loss, KL or None, clip); see :func:`triton_grpo_loss`. vespo takes its weights from `phi_seq`, (B,) or (B, 1); a last argument,
    keywords of :func:`get_gamma_weights`, has them made here.

    Keeps the logits and a few fp32 numbers a token."""

    @classmethod
    def apply(cls, logits, *options):
        if not torch.is_grad_enabled():
            logits = logits.detach()
        return super().apply(*map(gather_dtensor, (logits, *options)))

    @staticmethod
    def forward(ctx, logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, beta, eps_low, eps_high, inplace,
                loss_type="grpo", max_completion_length=None, reduce=True, importance_sampling_level="token", sapo_temperature_pos=1.0,
                sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, num_items_in_batch=None,
                phi_seq=None, gamma=None):
        assert importance_sampling_level in LEVELS, (
            f"{_OP}: importance_sampling_level is {importance_sampling_level!r}, expected one of {LEVELS}")
        options = Options(loss_type, importance_sampling_level, beta, eps_low, eps_high, delta, use_bias_correction_kl,
                          sapo_temperature_pos, sapo_temperature_neg)
        options.check(_OP)
        if delta is not None and loss_type not in CLIPPED:
            raise ValueError(f"{_OP}: delta is for the clipped losses, {', '.join(CLIPPED)}; loss_type is {loss_type!r}")
        if loss_type == "vespo" and phi_seq is None and gamma is None:
            raise ValueError(f"{_OP}: vespo needs phi_seq, the sequences' weights; get_gamma_weights makes them")
        check_temperature(_OP, temperature)
        _check_tensors(logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, beta)
        sequences, length, vocab = logits.shape[0], logits.shape[1] - 1, logits.shape[2]
        check_importance(_OP, vllm_is_ratio, sequences, length)
        assert phi_seq is None or phi_seq.shape in ((sequences,), (sequences, 1)), (
            f"{_OP}: phi_seq is {tuple(phi_seq.shape)}, expected ({sequences},) or ({sequences}, 1)")

        target = completion_targets(_OP, logits, completion_ids, completion_mask)
        check_range(target, vocab, labels.NO_LABEL)
        logp, largest, log_sum, _ = _ops.selective_log_softmax_forward(
            logits.detach().view(-1, vocab), target, labels.NO_LABEL, temperature, False)
        batch = Batch(options, length, vector(advantages), vector(old_logp), vector(ref_logp), vector(completion_mask),
                      vector(vllm_is_ratio), vector(phi_seq), gamma)
        terms = batch.terms(logp.view(sequences, length + 1)[:, :length].reshape(-1).contiguous())
        shape = (sequences, length)
        if reduce:
            mask = torch.ones(shape, device=logits.device) if completion_mask is None else completion_mask
            weights = sequence_weights(loss_type, mask, max_completion_length, num_items_in_batch).expand(shape)
            count = mask.sum(dtype=torch.float32).clamp(min=1.0)
            loss = (terms.loss.view(shape) * weights).sum()
            kl, clipped = (None if t is None else t.sum() / count for t in (terms.kl, terms.clipped))
        else:
            weights = None
            loss, kl, clipped = (None if t is None else t.view(shape) for t in (terms.loss, terms.kl, terms.clipped))
        if ctx.needs_input_grad[0]:
            ctx.options, ctx.inplace, ctx.shape = (labels.NO_LABEL, temperature), inplace, shape
            ctx.save_for_backward(logits, target, logp, largest, log_sum, terms.slope, terms.ratio_slope, weights, batch.mask)
        without_gradient(ctx, kl, clipped)
        return loss, kl, clipped

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, d_loss, *_):
        logits, target, logp, largest, log_sum, slope, ratio_slope, weights, mask = ctx.saved_tensors
        upstream = d_loss.detach().float()
        upstream = (upstream if weights is None else upstream * weights).reshape(-1)
        if mask is not None:  # whatever it is there, NaN included
            upstream = torch.where(mask != 0, upstream, 0.0)
        d = d_logp(slope, ratio_slope, upstream, mask, ctx.shape[1]).view(ctx.shape)
        d = torch.nn.functional.pad(d, (0, 1))  # the last position predicts nothing
        grad = gradient(logits, target, logp, largest, log_sum, None, d, None, *ctx.options, ctx.inplace)
        return (grad, *(None,) * (len(ctx.needs_input_grad) - 1))


def triton_grpo_loss(logits, old_logp, ref_logp, completion_ids, advantages, completion_mask=None, temperature=0.9, beta=0.04, eps_low=0.2,
                     eps_high=0.4, inplace=True, loss_type="dapo", max_completion_length=None, importance_sampling_level="token",
                     reduce=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None,
                     use_bias_correction_kl=False, num_items_in_batch=None, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
                     vespo_lambda_neg=2.0):
    """Losses of the GRPO family on logits; the name is that of the interface it keeps.

    logp = log_softmax(logits / temperature) at the ids, r = exp(logp - old) per token, or at sequence level the exponential of its
    masked mean; A the advantage. Per token, before the KL term:

        grpo, bnpo, dr_grpo, dapo, luspo   -min(min(r, delta) A, clamp(r, 1 - eps_low, 1 + eps_high) A)
        cispo                              -min(r, eps_high) A logp, the ratio a constant
        sapo                               -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A
        vespo                              -phi A logp, phi = w^k e^(lambda (1 - w)), w the sequence's importance weight

    times vllm_is_ratio (vespo: inside w), plus beta (e^k - k - 1), k = ref - logp, the latter times r under use_bias_correction_kl.

    Args:
        logits: (B, L + 1, V) contiguous, fp32, bf16 or fp16; the last position is not read, its gradient is 0.
        old_logp: (B, L) log-probabilities of the policy that sampled; None: the current ones, r = 1 with a gradient.
        ref_logp: (B, L) of the reference model, wanted where beta is not 0.
        completion_ids: (B, L) integers.
        advantages: (B,).
        completion_mask: (B, L), 0 where a token counts for nothing; None: all count.
        inplace: backward may write the gradient over the logits (never into a parameter, nor while the graph is kept). Autograd then
            refuses to run other operations that saved them.
        max_completion_length: dr_grpo's divisor; None: L.
        reduce: return the reduced loss in place of per-token ones.
        vllm_is_ratio: (B,), (B, 1) or (B, L) importance weights between sampler and trainer, or None.
        num_items_in_batch: tokens of the global batch, for dapo, cispo and vespo; None: the masks' sum over all processes.

    Returns:
        reduce False: (loss, KL or None for beta 0, clip indicator), each fp32 (B, L) times the mask. reduce True: (loss, [mean KL for
        beta other than 0, clip ratio]), fp32 scalars. Gradients flow from the loss.

    Raises:
        AssertionError: tensors that are missing or not contiguous; a wrong level; shapes of vllm_is_ratio other than these; a token out
            of range on the CPU (elsewhere NaN).
        ValueError: an unknown loss_type; delta or the sequence level with cispo, sapo or vespo; a temperature <= 0; other shapes that do
            not fit.
    """
    assert logits is not None and completion_ids is not None and advantages is not None, (
        f"{_OP}: logits, completion_ids and advantages are needed")
    gamma = {"k_pos": vespo_k_pos, "lambda_pos": vespo_lambda_pos, "k_neg": vespo_k_neg, "lambda_neg": vespo_lambda_neg}
    loss, kl, clipped = GrpoLossFunction.apply(
        logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, beta, eps_low, eps_high, inplace, loss_type,
        max_completion_length, reduce, importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg, vllm_is_ratio, delta,
        use_bias_correction_kl, num_items_in_batch, None, gamma)
    if reduce:
        return loss, [clipped] if kl is None else [kl, clipped]
    return loss, kl, clipped


def _masked_mean(values, mask):
    """Mean of `values` (B, L) over tokens whose mask is not 0; mask None: over all. 0 where there are none."""
    mask = torch.ones_like(values) if mask is None else mask
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def _reduce_grpo_loss(per_token_loss, completion_mask, loss_type, max_completion_length, num_items_in_batch=None):
    """The reduction of (B, L) losses that belongs to `loss_type`; differentiable. Mask None: all ones.

    Raises:
        ValueError: an unknown type.
    """
    mask = torch.ones_like(per_token_loss) if completion_mask is None else completion_mask
    return (per_token_loss * mask * sequence_weights(loss_type, mask, max_completion_length, num_items_in_batch)).sum()
