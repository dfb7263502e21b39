"""Terms of the GRPO family's losses, per token and per sequence, from log-probabilities. The loss on logits and the fused linear loss
share them."""

import dataclasses
import math

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.fakes import register_fake

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # PPO's clipped ratio; they differ in the reduction
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
LEVELS = ("token", "sequence")
_KINDS = dict.fromkeys(CLIPPED, 0) | {"cispo": 1, "sapo": 2, "vespo": 3}  # Kind of grpo_loss.h


@register_fake("liger_kernel::grpo_loss_tokens")
def _(logp, old_logp, ref_logp, mask, advantages, log_ratio, phi, importance, importance_per_token, first, length, kind, low, high, delta,
      beta, bias_correction, tau_positive, tau_negative, want_kl):
    def new(wanted):
        return logp.new_empty((logp.shape[0] if wanted else 0,))

    return new(True), new(want_kl), new(True), new(True), new(log_ratio is not None)


@dataclasses.dataclass
class Options:
    """What a token's terms depend on besides log-probabilities; the names are those of the losses' arguments."""

    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    beta: float = 0.04
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    use_bias_correction_kl: bool = False
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05

    def check(self, op):
        """ValueError for an unknown loss type, a type without a sequence level at that level, a sapo temperature <= 0."""
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"{op}: unknown loss_type {self.loss_type!r}, expected one of {', '.join(LOSS_TYPES)}")
        if self.sequence_level and self.loss_type not in CLIPPED:
            raise ValueError(f"{op}: loss_type {self.loss_type!r} has no sequence level; use importance_sampling_level='token'")
        if self.loss_type == "sapo" and not (self.sapo_temperature_pos > 0 and self.sapo_temperature_neg > 0):
            raise ValueError(f"{op}: sapo temperatures are {self.sapo_temperature_pos} and {self.sapo_temperature_neg}, "
                             "expected positive numbers")

    @property
    def sequence_level(self):
        return self.importance_sampling_level == "sequence"


@dataclasses.dataclass
class Terms:
    """Per token, fp32, each times the mask: loss, KL (None for beta 0), clip indicator; the loss's derivative by the token's own
    log-probability and, at sequence level, by the logarithm of the sequence's ratio (else None)."""

    loss: torch.Tensor
    kl: torch.Tensor | None
    clipped: torch.Tensor
    slope: torch.Tensor
    ratio_slope: torch.Tensor | None


def vector(t):
    """`t` flat, fp32 and contiguous, or None."""
    return None if t is None else t.detach().reshape(-1).float().contiguous()


@dataclasses.dataclass
class Batch:
    """What belongs to the tokens of B sequences of T tokens, flat and fp32.

    Attributes:
        old_logp, ref_logp, mask: (B T,) or None.
        advantages: (B,).
        importance: (B,) or (B T,), or None.
        phi: (B,) vespo's weights, or None: then they are made from the log-probabilities by `gamma`.
        gamma: keyword arguments of :func:`get_gamma_weights`.
    """

    options: Options
    length: int
    advantages: torch.Tensor
    old_logp: torch.Tensor | None = None
    ref_logp: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    importance: torch.Tensor | None = None
    phi: torch.Tensor | None = None
    gamma: dict | None = None

    def terms(self, logp, begin=0, masked=True):
        """:class:`Terms` of tokens [begin, begin + len(logp)), which are whole sequences where the terms depend on their sequence's
        others (`self.by_sequence`). masked=False: masked tokens are worked out like others."""
        o, length, end = self.options, self.length, begin + logp.numel()
        old, ref, mask = (None if t is None else t[begin:end] for t in (self.old_logp, self.ref_logp, self.mask))
        importance, per_token = self.importance, False
        if importance is not None and importance.numel() != self.advantages.numel():
            importance, per_token = importance[begin:end], True
        first, advantages, phi, log_ratio = begin, self.advantages, self.phi, None
        if self.by_sequence:  # their numbers are made for these sequences alone
            sequences = slice(begin // length, end // length) if length else slice(0, 0)
            first, advantages = 0, advantages[sequences]
            importance = importance if importance is None or per_token else importance[sequences]
            shape = (-1, length) if length else (0, 0)
            log_ratios = (logp - (logp if old is None else old)).view(shape)
            m = torch.ones_like(log_ratios) if mask is None else mask.view(shape)
            log_ratios = torch.where(m != 0, log_ratios, 0.0)
            if o.sequence_level:
                log_ratio = (log_ratios * m).sum(1) / m.sum(1).clamp(min=1)
            elif phi is None:
                weights = self.importance if self.importance is None else (
                    importance.view(shape) if per_token else importance.view(-1, 1))
                phi = get_gamma_weights(advantages, log_ratios, m, weights, **(self.gamma or {})).view(-1)
            else:
                phi = phi[sequences]
        if o.loss_type == "vespo":  # its ratio is inside phi
            importance = None
        low, high = (-math.inf, o.epsilon_high) if o.loss_type == "cispo" else (1 - o.epsilon_low, 1 + o.epsilon_high)
        loss, kl, clipped, slope, ratio_slope = _ops.grpo_loss_tokens(
            logp, old, ref if o.beta != 0 else None, mask if masked else None, advantages, log_ratio, phi, importance, per_token, first,
            length, _KINDS[o.loss_type], low, high, o.delta if o.loss_type in CLIPPED else None, o.beta, o.use_bias_correction_kl,
            o.sapo_temperature_pos, o.sapo_temperature_neg, o.beta != 0)
        return Terms(loss, kl if o.beta != 0 else None, clipped, slope, ratio_slope if o.sequence_level else None)

    @property
    def by_sequence(self):
        return self.options.sequence_level or self.options.loss_type == "vespo"


def d_logp(slope, ratio_slope, upstream, mask, length):
    """d(sum of upstream times loss) / d(logp) of whole sequences of `length` tokens, from the slopes of :class:`Terms`; `mask` (or None)
    is what the sequences' ratios were averaged with. All flat."""
    own = upstream * slope
    if ratio_slope is None or not own.numel():
        return own
    shared = (upstream * ratio_slope).view(-1, length).sum(1, keepdim=True)
    mask = torch.ones_like(own) if mask is None else mask
    m = mask.view(-1, length)
    return own + (m * (shared / m.sum(1, keepdim=True).clamp(min=1))).view(-1)


@torch.no_grad()
def get_gamma_weights(advantages, log_ratio_per_token, mask, importance_sampling_ratio=None, k_pos=2.0, lambda_pos=3.0, k_neg=3.0,
                      lambda_neg=2.0):
    """VESPO's weights of sequences, phi = w^k e^(lambda (1 - w)) of the sequence's importance weight w.

    log w = sum over tokens of clamp(log ratio, -20, 20) mask, plus, where given, the sum over its columns of clamp(log
    importance_sampling_ratio, log 1e-8, 20), clamped to [log 1e-8, 20]. k and lambda (at least 1e-4) go by the advantage's sign.

    Args:
        advantages: (B,) or (B, 1).
        log_ratio_per_token, mask: (B, T).
        importance_sampling_ratio: (B, T), or (B, 1) or (B,): once a sequence.

    Returns:
        (B, 1) fp32, without gradient; 0 where it is not finite.
    """
    lowest = math.log(1e-8)
    log_w = (log_ratio_per_token.float().clamp(-20.0, 20.0) * mask).sum(-1, keepdim=True)
    if importance_sampling_ratio is not None:
        ratio = importance_sampling_ratio.float()
        ratio = ratio.unsqueeze(-1) if ratio.dim() == 1 else ratio
        log_w = log_w + ratio.log().clamp(lowest, 20.0).sum(-1, keepdim=True)
    log_w = log_w.clamp(lowest, 20.0)
    positive = advantages.reshape(-1, 1) >= 0
    k = torch.where(positive, float(k_pos), float(k_neg)).to(log_w.dtype)
    rate = torch.where(positive, float(lambda_pos), float(lambda_neg)).clamp(min=1e-4).to(log_w.dtype)
    phi = torch.exp(rate + k * log_w - rate * log_w.exp())
    return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def check_importance(op, ratio, sequences, tokens):
    """AssertionError unless the importance-sampling ratio is None, (B,), (B, 1) or (B, T)."""
    allowed = ((sequences,), (sequences, 1), (sequences, tokens))
    assert ratio is None or tuple(ratio.shape) in allowed, (
        f"{op}: vllm_is_ratio is {tuple(ratio.shape)}, expected one of {', '.join(map(str, allowed))}")


def token_normalizer(mask, num_items_in_batch=None):
    """What dapo, cispo and vespo divide by, a 0-dim fp32 tensor: tokens of the global batch over the number of processes, at least 1.

    `num_items_in_batch` (int or tensor) counts the tokens of all processes; without it the masks' sum is reduced over them.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_items_in_batch is None:
        count = mask.detach().sum(dtype=torch.float32)
        if distributed:
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.SUM)
    elif isinstance(num_items_in_batch, torch.Tensor):
        count = num_items_in_batch.detach().to(device=mask.device, dtype=torch.float32).reshape(())
    else:
        count = torch.full((), float(num_items_in_batch), dtype=torch.float32, device=mask.device)
    return (count / (torch.distributed.get_world_size() if distributed else 1)).clamp(min=1.0)


def sequence_weights(loss_type, mask, max_completion_length=None, num_items_in_batch=None):
    """(B, 1) or 0-dim fp32: the weight of each sequence's summed loss in the reduction, for losses with the mask (B, T) applied.
    luspo: the mean over all B T entries of the loss times the sequence's length.

    Raises:
        ValueError: an unknown type.
    """
    sequences, tokens = mask.shape
    lengths = mask.detach().sum(1, keepdim=True, dtype=torch.float32)
    if loss_type in ("grpo", "sapo"):
        return 1 / (lengths.clamp(min=1.0) * max(sequences, 1))
    if loss_type == "bnpo":
        return 1 / lengths.sum().clamp(min=1.0)
    if loss_type == "dr_grpo":
        return torch.ones_like(lengths) / max(sequences * (tokens if max_completion_length is None else max_completion_length), 1)
    if loss_type in ("dapo", "cispo", "vespo"):
        return 1 / token_normalizer(mask, num_items_in_batch)
    if loss_type == "luspo":
        return lengths / max(sequences * tokens, 1)
    raise ValueError(f"unknown loss_type {loss_type!r}, expected one of {', '.join(LOSS_TYPES)}")
