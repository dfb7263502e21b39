"""Log-probabilities of selected tokens, and entropies, of logits that exist already: the row is read once forward, and once read and
once written backward. The passes over the logits are those of :mod:`liger_kernel.ops.fused_linear_log_probs`, which saves the logits
altogether where the head's weight is at hand."""

import math

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import as_rows, gather_dtensor, has_values, in_leaf, rows_apart
from liger_kernel.ops.cross_entropy import labels

EXPORTS = ["LigerSelectiveLogSoftmaxFunction", "fused_selective_log_softmax"]

_OP = "selective_log_softmax"


@register_fake("liger_kernel::selective_log_softmax_forward")
def _(logits, target, ignore_index, temperature, want_entropy):
    def new(wanted):
        return logits.new_empty((logits.shape[0] if wanted else 0,), dtype=torch.float32)

    return new(True), new(True), new(True), new(want_entropy)


@register_fake("liger_kernel::selective_log_softmax_backward")
def _(logits, target, logp, largest, log_sum, entropy, d_logp, d_entropy, ignore_index, temperature):
    return logits.new_empty(logits.shape)


@register_fake("liger_kernel::selective_log_softmax_backward_")
def _(logits, target, logp, largest, log_sum, entropy, d_logp, d_entropy, ignore_index, temperature):
    return None


def check_temperature(op, temperature):
    """ValueError unless the temperature is finite and positive."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"{op}: temperature is {temperature}, expected a finite positive number")


def check_range(target, vocab, ignore_index):
    """AssertionError for an index out of range, where the host knows without waiting: on the CPU. Elsewhere its row gives NaN."""
    if not target.is_cuda and has_values(target) and not torch.compiler.is_compiling():
        labels.ask(target, vocab, ignore_index).count()


class Rows:
    """Logits (..., V) as the ops take them, without a copy where they are `logits[:, :-1]` or `[:, 1:]` of larger ones: the rows in
    between belong to it, with an ignored target.

    Attributes:
        logits: (rows, V) with contiguous columns.
    """

    def __init__(self, logits):
        logits = logits.detach()
        self.shape, self.gap = logits.shape[:-1], 0
        if torch.compiler.is_compiling():  # strides are not known while a backward is traced
            self.logits = logits.reshape(-1, logits.shape[-1]).contiguous()
            return
        if logits.dim() == 3 and logits.stride(2) == 1 and min(logits.shape) > 0 and not logits.is_contiguous():
            batch, length, vocab = logits.shape
            apart, row = logits.stride()[:2]
            if row >= vocab and apart % row == 0 and apart // row >= length:
                self.gap = apart // row - length
                self.logits = logits.as_strided((batch * (length + self.gap) - self.gap, vocab), (row, 1))
                return
        self.logits = as_rows(logits)

    def spread(self, t, fill):
        """`t`, one number a position, as one a row."""
        if not self.gap:
            return t.reshape(-1).contiguous()
        return torch.nn.functional.pad(t, (0, self.gap), value=fill).view(-1)[: self.logits.shape[0]].contiguous()

    def collect(self, t):
        """The positions' share of `t` [rows, ...], in the logits' shape."""
        if not self.gap:
            return t.view(*self.shape, *t.shape[1:])
        return t.as_strided((*self.shape, *t.shape[1:]), ((self.shape[1] + self.gap) * t.stride(0), *t.stride()))


class LigerSelectiveLogSoftmaxFunction(torch.autograd.Function):
    """`apply(logits, index, temperature, ignore_index, want_entropy, in_place)` -> (logp, entropy or None); see
    :func:`selective_log_softmax`. Keeps the logits and three fp32 numbers a row."""

    @classmethod
    def apply(cls, logits, index, *options):
        if not torch.is_grad_enabled():
            logits = logits.detach()
        return super().apply(gather_dtensor(logits), gather_dtensor(index), *options)

    @staticmethod
    def forward(ctx, logits, index, temperature, ignore_index, want_entropy, in_place):
        ctx.set_materialize_grads(False)
        ctx.options, ctx.in_place = (ignore_index, temperature), in_place
        rows = Rows(logits)
        target = rows.spread(labels.indices(_OP, index), ignore_index)
        check_range(target, logits.shape[-1], ignore_index)
        logp, largest, log_sum, entropy = _ops.selective_log_softmax_forward(rows.logits, target, *ctx.options, want_entropy)
        entropy = entropy if want_entropy else None
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, target, logp, largest, log_sum, entropy)
        # Saved and returned are different tensors, so that a caller who changes a result does not change the gradients.
        return rows.collect(logp).clone(), None if entropy is None else rows.collect(entropy).clone()

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, d_logp, d_entropy):
        logits, target, *saved = ctx.saved_tensors
        if d_logp is None and d_entropy is None:
            return (None,) * 6
        upstream = [None if d is None else d.detach().float() for d in (d_logp, d_entropy)]
        return (gradient(logits, target, *saved, *upstream, *ctx.options, ctx.in_place), *(None,) * 5)


def gradient(logits, target, logp, largest, log_sum, entropy, d_logp, d_entropy, ignore_index, temperature, in_place):
    """The gradient of the logits from upstream gradients of their shape without V, either None; `target` and the others are one
    number a row of :class:`Rows`. Written over the logits where that is asked for and nobody can be surprised: not into a parameter,
    not while the graph is kept for another backward, not under torch.compile."""
    rows = Rows(logits)
    arguments = (target, logp, largest, log_sum, entropy, *(None if d is None else rows.spread(d, 0.0) for d in (d_logp, d_entropy)),
                 ignore_index, temperature)
    compiling = torch.compiler.is_compiling()
    if (in_place and not compiling and not rows.gap and rows_apart(rows.logits) and not in_leaf(logits)
            and rows.logits.data_ptr() == logits.data_ptr() and not torch._C._autograd._get_current_graph_task_keep_graph()):
        _ops.selective_log_softmax_backward_(rows.logits, *arguments)
        torch.autograd.graph.increment_version(logits)
        return logits.detach()
    return rows.collect(_ops.selective_log_softmax_backward(rows.logits, *arguments))


def selective_log_softmax(logits, index, temperature=1.0, *, ignore_index=-100, return_entropy=False, in_place=False):
    """log_softmax(logits / temperature) at `index`, in fp32 arithmetic, without the log-softmax of the whole row.

    Args:
        logits: (..., V), fp32, bf16 or fp16, any strides; `logits[:, :-1]` is not copied.
        index: (...) int64 (narrower integers are widened); positions of `ignore_index` are not read, their results and gradients are 0.
        temperature: finite and positive.
        return_entropy: also return the entropy of each position's distribution, in nats.
        in_place: backward may write the gradient over the logits; autograd then refuses to run other operations that saved them.

    Returns:
        logp (...) in fp32, or (logp, entropy); both differentiable, with any upstream gradients. The gradient has the logits' dtype.

    Raises:
        AssertionError: an index out of range on the CPU (elsewhere, and under torch.compile, its results are NaN).
        ValueError: shapes that do not fit; a temperature out of range.
        RuntimeError: indices that are not integers; other dtypes; tensors on different devices.
    """
    check_temperature(_OP, temperature)
    if logits.dim() < 1 or index.shape != logits.shape[:-1]:
        raise ValueError(f"{_OP}: index is {tuple(index.shape)}, logits {tuple(logits.shape)}; expected (...) and (..., V)")
    logp, entropy = LigerSelectiveLogSoftmaxFunction.apply(logits, index, temperature, ignore_index, return_entropy, in_place)
    return (logp, entropy) if return_entropy else logp


@torch.no_grad()
def fused_selective_log_softmax(logits, input_ids, temperature=0.9, mask=None):
    """Log-probabilities of a completion's tokens; autograd does not record it.

    Args:
        logits: (B, L + 1, V) contiguous, fp32, bf16 or fp16; the last position is not read.
        input_ids: (B, at least L) integers; its last L columns count.
        temperature: divides the logits; finite and positive.
        mask: (B, at least L) or None; its last L columns count, 0 where a token is left out.

    Returns:
        (B, L) fp32; 0 at masked positions.

    Raises:
        AssertionError: logits that are not contiguous; a token out of range on the CPU (elsewhere NaN).
        ValueError: shapes that do not fit; a temperature out of range.
    """
    logits, input_ids, mask = gather_dtensor(logits), gather_dtensor(input_ids), gather_dtensor(mask)
    assert logits.is_contiguous(), f"fused_selective_log_softmax: logits have strides {logits.stride()}; expected contiguous ones"
    check_temperature("fused_selective_log_softmax", temperature)
    target = completion_targets("fused_selective_log_softmax", logits, input_ids, mask)
    check_range(target, logits.shape[-1], labels.NO_LABEL)
    logp = _ops.selective_log_softmax_forward(logits.view(-1, logits.shape[-1]), target, labels.NO_LABEL, temperature, False)[0]
    return logp.view(logits.shape[:2])[:, :-1].contiguous()


def completion_targets(op, logits, ids, mask):
    """One target a row of logits (B, L + 1, V): the last L columns of `ids`, NO_LABEL where the last L of `mask` are 0, and at the last
    position. (B (L + 1),) int64."""
    length = logits.shape[1] - 1 if logits.dim() == 3 else -1
    for name, t in (("ids", ids), ("mask", mask)):
        if length < 0 or (t is not None and (t.dim() != 2 or t.shape[0] != logits.shape[0] or t.shape[1] < length)):
            got = "" if t is None else f" and {name} {tuple(t.shape)}"
            raise ValueError(f"{op}: logits are {tuple(logits.shape)}{got}, expected (B, L + 1, V) and (B, L)")
    target = ids.new_full(logits.shape[:2], labels.NO_LABEL, dtype=torch.int64)
    if length:
        ids = labels.indices(op, ids[:, -length:])
        target[:, :-1] = ids if mask is None else torch.where(mask[:, -length:] != 0, ids, labels.NO_LABEL)
    return target.view(-1)
