"""Total variation distance between two distributions. With a reduction, the gradient is formed in forward, in the same pass over both
operands."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import descendant, first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import as_rows, gather_dtensor
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.kl_div import REDUCTIONS, late, scaled

EXPORTS = ["LigerTVDLossFunction"]


@register_fake("liger_kernel::tvd_forward")
def _(input, target, labels, scale, reduce, divisor, ignore_index, want_grad):
    loss = input.new_empty((1,) if reduce else input.shape, dtype=torch.float32)
    return loss, input.new_empty(input.shape if want_grad else (0,))


@register_fake("liger_kernel::tvd_backward")
def _(dy, input, target, labels, scale, reduce, divisor, ignore_index):
    return torch.empty_like(input, memory_format=torch.contiguous_format)


class LigerTVDLossFunction(torch.autograd.Function):
    """`apply(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100)`; see :func:`liger_tvd`."""

    @classmethod
    def apply(cls, p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        p, q, shift_labels = gather_dtensor(p), gather_dtensor(q), gather_dtensor(shift_labels)
        if not torch.is_grad_enabled():  # forward cannot see this; without it a gradient would be made for nobody
            p = p.detach()
        return super().apply(p, q, shift_labels, reduction, ignore_index)

    @staticmethod
    def forward(ctx, p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
        if reduction not in REDUCTIONS:
            raise KeyError(f"tvd: reduction is {reduction!r}, expected one of {REDUCTIONS}")
        if p.shape != q.shape:
            raise ValueError(f"tvd: input is {tuple(p.shape)}, target is {tuple(q.shape)}; they must be equal")
        count = p.shape[:-1].numel()
        assert shift_labels is None or shift_labels.shape == (count,), (
            f"tvd: shift_labels is {tuple(shift_labels.shape)}, expected ({count},) for an input of {tuple(p.shape)}")
        want_grad, ctx.late = ctx.needs_input_grad[0], late(reduction, p.dtype)
        chosen = scale = None
        if shift_labels is not None:
            chosen = labels.indices("tvd", shift_labels)
            if reduction in ("mean", "batchmean"):
                stats = _ops.cross_entropy_label_stats(chosen, None, p.shape[-1], ignore_index)
                scale, count = stats.view(torch.float32)[:1], 1  # LabelStats.inverse_count
        divisor = {"mean": count * p.shape[-1], "batchmean": count}.get(reduction, 1)
        ctx.how, rows, target = (reduction != "none", divisor, ignore_index), as_rows(p), as_rows(q)
        loss, grad = _ops.tvd_forward(rows, target, chosen, scale, *ctx.how, want_grad and not ctx.late)
        if want_grad:
            origin = None if torch.compiler.is_compiling() else descendant(p)
            if ctx.late:
                ctx.save_for_backward(rows, target, chosen, scale, origin)
            else:
                ctx.save_for_backward(grad, origin)
            ctx.shape = p.shape
        return loss.view(p.shape if reduction == "none" else ())

    @staticmethod
    @first_derivative_only("tvd")
    def backward(ctx, d_loss):
        grad = None
        if ctx.needs_input_grad[0]:
            if ctx.late:
                rows, target, chosen, scale, _ = ctx.saved_tensors
                dy = as_rows(d_loss) if d_loss.dim() else d_loss
                grad = _ops.tvd_backward(dy, rows, target, chosen, scale, *ctx.how)
            else:
                grad = scaled(ctx.saved_tensors[0], d_loss)
            grad = grad.view(ctx.shape)
        return grad, None, None, None, None


def liger_tvd(input, target, shift_labels=None, reduction="mean", ignore_index=-100):
    """Total variation distance |input - target| / 2 of each element, reduced; fp32 inside.

    Args:
        input: [..., V] probabilities, fp32, bf16 or fp16, any strides; usually (tokens, V).
        target: input's shape, one of those dtypes, input's own or not. Takes no gradient.
        shift_labels: (tokens,) integers or None; a row whose label is `ignore_index` counts for nothing.
        reduction: "none", "sum", "mean" (over all elements of the rows that count) or "batchmean" (over those rows).
        ignore_index: the label of rows to leave out.

    Returns:
        fp32: of input's shape for "none", else one number; 0 when no row counts. The gradient is half the sign of input - target, 0
        where they are equal, times the reduction's factor, in input's dtype.

    Raises:
        AssertionError: shift_labels of another shape.
        KeyError: another reduction.
        ValueError: input and target of different shapes.
        RuntimeError (ValueError before torch 2.12): labels that are not integers, tensors on different devices, or of another dtype.
    """
    return LigerTVDLossFunction.apply(input, target, shift_labels, reduction, ignore_index)


class LigerTVDLoss(torch.nn.Module):
    """Total variation distance as a module; see :func:`liger_tvd`."""

    def __init__(self, reduction="batchmean", ignore_index=-100):
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p, q, shift_labels=None):
        return LigerTVDLossFunction.apply(p, q, shift_labels, self.reduction, self.ignore_index)

    def extra_repr(self):
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}"
