"""Cross entropy over logits whose vocabulary is spread over ranks (Shoeybi et al., Megatron-LM, 2019): each rank holds V / P columns.

Nobody sees a whole row. Forward reads the local shard once, for its largest logit and the sum of its exponentials, and combines
them in two all-reduces of a few numbers a row (MAX, then SUM); backward needs no communication and reads the shard once more. The
passes over the logits are those of :mod:`liger_kernel.ops.selective_log_softmax`."""

import torch

import liger_kernel.ops.selective_log_softmax  # noqa: F401, registers the fake kernels of its ops
from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.tensors import as_rows, has_values
from liger_kernel.ops.cross_entropy import labels

EXPORTS = ["LigerVocabParallelCEFunction"]
__all__ = ["LigerVocabParallelCEFunction", "LigerVocabParallelCrossEntropy", "validate_formula_and_mode"]

_OP = "vocab_parallel_cross_entropy"
_FORMULAS, _MODES = ("pytorch", "megatron"), ("global", "partition")
_NOBODY = -1  # target of the rows that the kernels leave out
_CHUNK = 1 << 22  # elements that the smoothed backward holds in fp32 at a time


def validate_formula_and_mode(formula, mode):
    """ValueError unless `formula` is "pytorch" or "megatron" and `mode` "global" or "partition"."""
    for name, value, known in (("label_smoothing_formula", formula, _FORMULAS), ("label_smoothing_mode", mode, _MODES)):
        if value not in known:
            raise ValueError(f"{_OP}: {name} is {value!r}, expected one of {known}")


def validate_label_smoothing(label_smoothing):
    """ValueError unless it lies in [0, 1)."""
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"{_OP}: label_smoothing is {label_smoothing}, expected a number in [0, 1)")


def _place(group):
    """(this rank's place in the group, its size); no group counts as one of one rank."""
    if group is None:
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _statistics(logits, target, first, vocab, ignore_index):
    """What a shard says about each row, before anybody else is asked.

    Args:
        logits: (rows, V / P), the columns from `first` on.
        target: (rows,) int64, global.

    Returns:
        valid: whether the row counts. own: whether its target lies in this shard. local: that target, 0 where it lies elsewhere,
        _NOBODY where the row does not count. picked: the target's logit, fp32, where owned (elsewhere any number). largest, log_sum:
        of the shard, fp32.
    """
    valid = target != ignore_index
    inside = (target >= 0) & (target < vocab)
    if not target.is_cuda and has_values(target) and not torch.compiler.is_compiling() and not bool((inside | ~valid).all()):
        wrong = target[valid & ~inside]
        raise AssertionError(f"Target {int(wrong[0])} is out of bounds. Expected >= 0 and < {vocab} ({len(wrong)} of {len(target)} labels)")
    columns = logits.shape[1]
    own = valid & (target >= first) & (target < first + columns)
    column = torch.where(own, target - first, 0)
    local = torch.where(valid, column, _NOBODY)
    _, largest, log_sum, _ = _ops.selective_log_softmax_forward(logits, local, _NOBODY, 1.0, False)
    picked = logits.gather(1, column[:, None]).squeeze(1).float()
    # Outside the vocabulary nobody owns the target: NaN, where the host cannot raise without waiting.
    return valid, own, local, torch.where(valid & ~inside, torch.nan, picked), largest, log_sum


class LigerVocabParallelCEFunction(torch.autograd.Function):
    """`apply(vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, label_smoothing_formula, label_smoothing_mode)`
    -> loss (S, B) fp32; see :class:`LigerVocabParallelCrossEntropy`. Saves the logits and two fp32 numbers a row."""

    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, tp_group=None, ignore_index=-100, label_smoothing=0.0,
                label_smoothing_formula="pytorch", label_smoothing_mode="global"):
        validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        validate_label_smoothing(label_smoothing)
        shape = vocab_parallel_logits.shape
        if len(shape) != 3 or target.shape != shape[:2]:
            raise ValueError(f"{_OP}: logits are {tuple(shape)} and target {tuple(target.shape)}, expected (S, B, V / P) and (S, B)")
        if shape[2] == 0:
            raise ValueError(f"{_OP}: logits are {tuple(shape)}; this rank holds no column of the vocabulary")
        rank, ranks = _place(tp_group)
        logits, target = as_rows(vocab_parallel_logits), labels.indices(_OP, target).reshape(-1)
        columns, vocab = shape[2], shape[2] * ranks
        valid, own, local, picked, largest, log_sum = _statistics(logits, target, rank * columns, vocab, ignore_index)

        top = largest.clone()
        if ranks > 1:
            torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, tp_group)
        empty = largest == -torch.inf  # a shard of columns that are masked
        sums = [torch.where(empty, 0.0, torch.exp(log_sum + (largest - top))), torch.where(own | picked.isnan(), picked - top, 0.0)]
        if label_smoothing:
            total = logits.sum(1, dtype=torch.float32) - columns * top
            if label_smoothing_mode == "global":
                sums.append(total)
        sums = torch.stack(sums)
        if ranks > 1:
            torch.distributed.all_reduce(sums, torch.distributed.ReduceOp.SUM, tp_group)
        log_sum = sums[0].log()  # relative to `top`, as are the other sums
        loss = log_sum - sums[1]

        smoothing = uniform = 0.0
        if label_smoothing:
            classes = vocab if label_smoothing_mode == "global" else columns
            smoothing = label_smoothing
            if label_smoothing_formula == "megatron":
                if classes == 1:
                    raise ValueError(f"{_OP}: label_smoothing_formula is 'megatron' with one class; it divides by the classes less one")
                smoothing *= classes / (classes - 1)
            uniform = smoothing / classes
            mean = (sums[2] if label_smoothing_mode == "global" else total) / classes - log_sum
            loss = (1.0 - smoothing) * loss - smoothing * mean
        ctx.save_for_backward(vocab_parallel_logits, local, own, top, log_sum)
        ctx.smoothing = (smoothing, uniform)
        return torch.where(valid, loss, 0.0).view(shape[:2])

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, d_loss):
        if not ctx.needs_input_grad[0]:
            return (None,) * 7
        vocab_parallel_logits, local, own, top, log_sum = ctx.saved_tensors
        logits = as_rows(vocab_parallel_logits.detach())
        factor = torch.where(local == _NOBODY, 0.0, d_loss.detach().reshape(-1).float())
        gradient = (_smoothed if ctx.smoothing[0] else _plain)(logits, local, own, top, log_sum, factor, *ctx.smoothing)
        return gradient.view(vocab_parallel_logits.shape), *(None,) * 6


def _plain(logits, local, own, top, log_sum, factor, *_):
    """factor (p - [own target]), rounded once. The kernel takes every row's `local` column for its target; where the target lies in
    another shard, that one element is put right."""
    column = local.clamp(min=0)[:, None]
    logp = logits.gather(1, column).squeeze(1).float() - top - log_sum
    gradient = _ops.selective_log_softmax_backward(logits, local, logp, top, log_sum, None, -factor, None, _NOBODY, 1.0)
    there = gradient.gather(1, column)
    elsewhere = (factor * logp.exp()).to(gradient.dtype)[:, None]
    valid = (local != _NOBODY)[:, None]
    return gradient.scatter_(1, column, torch.where(own[:, None] | ~valid, there, elsewhere))


def _smoothed(logits, local, own, top, log_sum, factor, smoothing, uniform):
    """factor (p - uniform - (1 - smoothing) [own target]), in fp32 by chunks of rows and rounded once."""
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    step = max(_CHUNK // logits.shape[1], 1)
    column, less = local.clamp(min=0)[:, None], torch.where(own, 1.0 - smoothing, 0.0)[:, None]
    shift = (top + log_sum)[:, None]
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        part = logits[rows].float().sub(shift[rows]).exp_().sub_(uniform)
        part.scatter_(1, column[rows], part.gather(1, column[rows]) - less[rows]).mul_(factor[rows, None])
        gradient[rows] = torch.where(local[rows, None] == _NOBODY, 0.0, part)
    return gradient


class LigerVocabParallelCrossEntropy(torch.nn.Module):
    """Cross entropy of logits of which each rank of a group holds V / P columns, in rank order.

    Per position, with x the logits, p = softmax(x) over the global vocabulary, y the target, a = label_smoothing:
    loss = (1 - a') (lse - x_y) - a' mean(log p), where a' = a ("pytorch") or a K / (K - 1) ("megatron"), and the mean is over
    K = V columns ("global") or over the K = V / P of this rank ("partition": then ranks have different losses). The gradient is
    p - a' / K - (1 - a') [i = y], in the logits' dtype; every rank gets that of its own columns.

    Args:
        ignore_index: positions with this target have loss and gradient 0.
        label_smoothing: a, in [0, 1).
        reduction: "none" alone.
        label_smoothing_formula: "pytorch" or "megatron".
        label_smoothing_mode: "global" or "partition".

    Raises:
        ValueError: an option out of range; in forward, logits that are not three-dimensional or a target of another shape.
        AssertionError: in forward on the CPU, a target outside the global vocabulary (elsewhere its loss is NaN).
    """

    def __init__(self, ignore_index=-100, label_smoothing=0.0, reduction="none", label_smoothing_formula="pytorch",
                 label_smoothing_mode="global"):
        super().__init__()
        if reduction != "none":
            raise ValueError(f"{_OP}: reduction is {reduction!r}, expected 'none'; reduce the returned (S, B) losses yourself")
        validate_label_smoothing(label_smoothing)
        validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.label_smoothing_formula, self.label_smoothing_mode = label_smoothing_formula, label_smoothing_mode

    def forward(self, vocab_parallel_logits, target, tp_group=None):
        """Losses (S, B), fp32.

        Args:
            vocab_parallel_logits: (S, B, V / P), fp32, bf16 or fp16; keeps its values.
            target: (S, B) integers in the global vocabulary, equal on all ranks.
            tp_group: the process group; None for logits that are whole.
        """
        return LigerVocabParallelCEFunction.apply(
            vocab_parallel_logits, target, tp_group, self.ignore_index, self.label_smoothing, self.label_smoothing_formula,
            self.label_smoothing_mode)

    def extra_repr(self):
        return (f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
                f"label_smoothing_formula={self.label_smoothing_formula!r}, label_smoothing_mode={self.label_smoothing_mode!r}")
