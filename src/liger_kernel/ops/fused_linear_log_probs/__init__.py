"""Log-probabilities of target tokens, entropy, log-sum-exp and predicted tokens of a linear layer's output, without its logits.

:func:`fused_linear_log_probs` is differentiable in its results; the logits are made twice. :func:`log_probs_and_gradients` is for
losses that are functions of these results: it makes the logits once.
"""

import dataclasses
import math

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import as_rows, gather_dtensor, product_dtype, unit_stride
from liger_kernel.ops.cross_entropy import labels

EXPORTS = ["LigerFusedLinearLogProbsFunction", "LigerFusedLinearScaledCrossEntropyFunction"]

_OP = "fused_linear_log_probs"


@dataclasses.dataclass
class LogProbs:
    """Results, each of the target's shape; those that were not asked for are None. At ignored positions everything is 0,
    `predicted_tokens` -1 and `hits` False.

    Attributes:
        logp: log-probability of the target in nats, fp32.
        entropy: of the distribution, in nats, fp32.
        lse: log of the sum of the exponentials, fp32.
        predicted_tokens: index of the first largest logit, int64.
        hits: whether that is the target, bool.
    """

    logp: torch.Tensor
    entropy: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None
    hits: torch.Tensor | None = None


def _fake_results(x, want_entropy, want_prediction):
    rows = x.shape[0]

    def new(wanted, dtype=torch.float32):
        return x.new_empty((rows if wanted else 0,), dtype=dtype)

    return new(True), new(True), new(True), new(want_entropy), new(want_prediction, torch.int64)


@register_fake("liger_kernel::fused_linear_log_probs_forward")
def _(x, weight, target, bias, ignore_index, softcap, logit_scale, temperature, logits_bytes, want_entropy, want_prediction):
    return _fake_results(x, want_entropy, want_prediction)


@register_fake("liger_kernel::fused_linear_log_probs_backward")
def _(x, weight, target, bias, logp, largest, log_sum, entropy, d_logp, d_entropy, d_lse, ignore_index, softcap, logit_scale, temperature,
      logits_bytes, want_dx, want_dw, want_db, dw_fp32):
    hidden, vocab = x.shape[1], weight.shape[0]
    return (x.new_empty((x.shape[0] if want_dx else 0, hidden), dtype=torch.float32),
            x.new_empty((vocab if want_dw else 0, hidden), dtype=torch.float32 if dw_fp32 else x.dtype),
            x.new_empty((vocab if want_db else 0,), dtype=torch.float32))


@register_fake("liger_kernel::fused_linear_log_probs_chunk_forward_")
def _(logits, x, weight, target, bias, ignore_index, softcap, logit_scale, temperature, want_entropy, want_prediction):
    return _fake_results(x, want_entropy, want_prediction)


@register_fake("liger_kernel::fused_linear_log_probs_chunk_backward_")
def _(logits, dw, db, x, weight, target, logp, largest, log_sum, entropy, d_logp, d_entropy, d_lse, ignore_index, softcap, logit_scale,
      temperature, want_dx, add):
    return x.new_empty((x.shape[0] if want_dx else 0, x.shape[1]), dtype=torch.float32)


def _transform(temperature, logit_scale, softcap):
    """(softcap, logit_scale, temperature) as the ops take them. ValueError where they are out of range."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"{_OP}: temperature is {temperature}, expected a finite positive number")
    if not math.isfinite(logit_scale):
        raise ValueError(f"{_OP}: logit_scale is {logit_scale}, expected a finite number")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{_OP}: softcap is {softcap}, expected a positive number or None")
    return softcap or 0.0, logit_scale, temperature


def _check_shapes(x, weight, target, bias):
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{_OP}: x is {tuple(x.shape)} and weight {tuple(weight.shape)}, expected (..., H) and (V, H)")
    if target.shape != x.shape[:-1]:
        raise ValueError(f"{_OP}: target is {tuple(target.shape)}, expected {tuple(x.shape[:-1])}, x's shape without the last dimension")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{_OP}: bias is {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}")


class _Operands:
    """x, weight and bias as the ops take them, of one dtype, and the rows that are worked on.

    Attributes:
        x, weight, bias: (rows, H), (V, H), (V,) or None, all of the products' dtype.
        target: (rows,) int64.
        count: rows that are not ignored, or None where the host cannot know: then all rows are worked on.
        kept: int64 indices of those rows, or None when they are all.
    """

    def __init__(self, x, weight, target, bias, dtype, ignore_index, label_stats=None, count=-1):
        x, weight = x.detach(), weight.detach()
        if torch.compiler.is_compiling():  # strides are not known while a backward is traced
            self.x, self.weight = x.reshape(-1, x.shape[-1]).contiguous().to(dtype), weight.contiguous().to(dtype)
        else:
            self.x, self.weight = as_rows(x).to(dtype), unit_stride(weight).to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype).contiguous()
        self.target = labels.indices(_OP, target.reshape(-1))
        if count == -1:
            count = (label_stats or labels.ask(self.target, weight.shape[0], ignore_index)).count()
        self.count, self.kept = count, None
        if count is not None and count < self.target.numel():
            self.kept = torch.nonzero_static(self.target != ignore_index, size=count).squeeze(1)

    def pick(self, t):
        """The kept rows of `t`."""
        return t if t is None or self.kept is None else t.index_select(0, self.kept)

    def place(self, t, fill=0):
        """The kept rows `t` in their places, `fill` elsewhere."""
        return t if self.kept is None else t.new_full((self.target.numel(), *t.shape[1:]), fill).index_copy_(0, self.kept, t)


class LigerFusedLinearLogProbsFunction(torch.autograd.Function):
    """`apply(x, weight, target, bias, options, want_entropy, want_lse, want_prediction, ignore_index, label_stats, logits_memory)`
    -> (logp, entropy, lse, predicted_tokens); `options` is (softcap or 0.0, logit_scale, temperature).

    Keeps x, weight, target, bias and four fp32 numbers a row; backward makes the logits again and needs the weight.
    """

    @classmethod
    def apply(cls, x, weight, target, bias, *options):
        # out here, a DTensor gets a DTensor gradient
        return super().apply(*(gather_dtensor(t) for t in (x, weight, target, bias)), *options)

    @staticmethod
    def forward(ctx, x, weight, target, bias, options, want_entropy, want_lse, want_prediction, ignore_index, label_stats, logits_memory):
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.options, ctx.ignore_index, ctx.logits_memory = product_dtype(_OP, x, weight), options, ignore_index, logits_memory
        o = _Operands(x, weight, target, bias, ctx.dtype, ignore_index, label_stats)
        logp, largest, log_sum, entropy, prediction = _ops.fused_linear_log_probs_forward(
            o.pick(o.x), o.weight, o.pick(o.target), o.bias, ignore_index, *options, logits_memory, want_entropy, want_prediction)
        ctx.count = o.count
        ctx.save_for_backward(x, weight, target, bias, logp, largest, log_sum, entropy if want_entropy else None)
        lse = o.place(largest + log_sum).view(target.shape) if want_lse else None
        prediction = o.place(prediction, -1).view(target.shape) if want_prediction else None
        if want_prediction:
            ctx.mark_non_differentiable(prediction)
        # Saved and returned are different tensors, so that a caller who changes a result does not change the gradients.
        logp, entropy = (o.place(t).view(target.shape).clone() if w else None for t, w in ((logp, True), (entropy, want_entropy)))
        return logp, entropy, lse, prediction

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, d_logp, d_entropy, d_lse, _):
        x, weight, target, bias, logp, largest, log_sum, entropy = ctx.saved_tensors
        want_dx, want_dw, _, want_db = ctx.needs_input_grad[:4]
        nothing = (None,) * len(ctx.needs_input_grad)
        if d_logp is None and d_entropy is None and d_lse is None:
            return nothing
        o = _Operands(x, weight, target, bias, ctx.dtype, ctx.ignore_index, count=ctx.count)
        upstream = [None if d is None else o.pick(d.detach().reshape(-1).float()).contiguous() for d in (d_logp, d_entropy, d_lse)]
        dx, dw, db = _ops.fused_linear_log_probs_backward(
            o.pick(o.x), o.weight, o.pick(o.target), o.bias, logp, largest, log_sum, entropy, *upstream, ctx.ignore_index, *ctx.options,
            ctx.logits_memory, want_dx, want_dw, want_db, ctx.dtype == torch.float32 or weight.dtype != ctx.dtype)
        return (o.place(dx.to(x.dtype)).view(x.shape) if want_dx else None, dw.to(weight.dtype) if want_dw else None, None,
                db.to(bias.dtype) if want_db else None, *nothing[4:])


def fused_linear_log_probs(x, weight, target, bias=None, *, temperature=1.0, logit_scale=1.0, softcap=None, ignore_index=-100,
                           return_entropy=False, return_lse=False, return_predicted_tokens=False, return_hits=False, label_stats=None,
                           logits_memory=0):
    """Per-token results of logits = x weight^T + bias, without the (tokens, V) logits.

    z = softcap tanh(logits logit_scale / softcap) / temperature (no cap: logits logit_scale / temperature); lse = log sum exp(z);
    logp = z_target - lse; entropy = lse - sum softmax(z) z. Statistics are fp32.

    Args:
        x: (..., H) hidden states, fp32, bf16 or fp16, any strides.
        weight: (V, H). Under autocast both are used in its dtype, otherwise in the wider of the two.
        target: (...) token indices, int64 (narrower integers are widened); positions of `ignore_index` are not worked on.
        bias: (V,) or None.
        temperature: finite and positive.
        logit_scale: multiplies the logits before the soft cap.
        softcap: positive, or None for no cap.
        return_entropy, return_lse, return_predicted_tokens, return_hits: which results are wanted besides `logp`.
        label_stats: what `labels.ask(target.reshape(-1), V, ignore_index)` returned, when it was asked for earlier.
        logits_memory: bytes of logits held at once, 0 for the default (not below 1024 columns of all rows on the CPU, 2048 on CUDA).

    Returns:
        :class:`LogProbs`. logp, entropy and lse are differentiable, with any upstream gradients, in x, weight and bias; each of these
        gets a gradient of its own dtype, and only where it requires one.

    Raises:
        AssertionError: a target out of range (not under torch.compile or graph capture, where its results are NaN).
        ValueError: shapes that do not fit; temperature, logit_scale or softcap out of range.
        RuntimeError: targets that are not integers; other dtypes; tensors on different devices.
    """
    x, weight, target, bias = (gather_dtensor(t) for t in (x, weight, target, bias))
    _check_shapes(x, weight, target, bias)
    options = _transform(temperature, logit_scale, softcap)
    logp, entropy, lse, prediction = LigerFusedLinearLogProbsFunction.apply(
        x, weight, target, bias, options, return_entropy, return_lse, return_predicted_tokens or return_hits, ignore_index, label_stats,
        logits_memory)
    return LogProbs(logp, entropy, lse, prediction if return_predicted_tokens else None,
                    (prediction == target) & (target != ignore_index) if return_hits else None)


def __getattr__(name):  # what is built on the above, and imports it
    if name in ("log_probs_and_gradients", "log_probs_and_gradients_in_tiles", "ChunkLoss"):
        from liger_kernel.ops.fused_linear_log_probs import one_pass as home
    elif name == "LigerFusedLinearScaledCrossEntropyFunction":
        from liger_kernel.ops.fused_linear_log_probs import scaled_cross_entropy as home
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(home, name)
