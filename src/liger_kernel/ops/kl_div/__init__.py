"""Kullback-Leibler divergence. With a reduction, the gradient is formed in forward, in the same pass over both operands."""

import torch

import liger_kernel.ops.cross_entropy  # registers the fakes of its scale ops, which backward calls
from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import descendant, first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import as_rows, gather_dtensor

EXPORTS = ["LigerKLDivLossFunction"]

REDUCTIONS = ("none", "sum", "mean", "batchmean")


@register_fake("liger_kernel::kl_div_forward")
def _(input, target, reduce, divisor, log_target, eps, want_grad):
    loss = input.new_empty((1,) if reduce else input.shape, dtype=torch.float32)
    return loss, input.new_empty(input.shape if want_grad else (0,))


@register_fake("liger_kernel::kl_div_backward")
def _(dy, target, like, reduce, divisor, log_target):
    return target.new_empty(target.shape, dtype=like.dtype)


def _rows(t):
    return as_rows(t if t.dim() else t.reshape(1))


def late(reduction, dtype):
    """Whether backward forms the gradient: that of each element needs the upstream one, and fp16's would be lost without its loss scale,
    since 1 / elements is below what fp16 holds."""
    return reduction == "none" or dtype == torch.float16


def scaled(grad, upstream):
    """The gradient that forward formed, [rows, columns], times an upstream gradient of no dimension: in its own memory, unless the graph
    is kept for another backward."""
    factor = upstream.float()
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return _ops.cross_entropy_scale(grad, factor)
    _ops.cross_entropy_scale_(grad, factor)
    torch.autograd.graph.increment_version(grad)
    return grad


class LigerKLDivLossFunction(torch.autograd.Function):
    """`apply(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10)`; see :func:`liger_kl_div`."""

    @classmethod
    def apply(cls, y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
        y_pred, y_true = gather_dtensor(y_pred), gather_dtensor(y_true)
        if not torch.is_grad_enabled():  # forward cannot see this; without it a gradient would be made for nobody
            y_pred = y_pred.detach()
        return super().apply(y_pred, y_true, reduction, log_target, eps)

    @staticmethod
    def forward(ctx, y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
        if reduction not in REDUCTIONS:
            raise KeyError(f"kl_div: reduction is {reduction!r}, expected one of {REDUCTIONS}")
        if y_pred.shape != y_true.shape:
            raise ValueError(f"kl_div: input is {tuple(y_pred.shape)}, target is {tuple(y_true.shape)}; they must be equal")
        want_grad, ctx.late = ctx.needs_input_grad[0], late(reduction, y_pred.dtype)
        divisor = {"mean": y_pred.numel(), "batchmean": y_pred.shape[0] if y_pred.dim() else 1}.get(reduction, 1)
        ctx.how, target = (reduction != "none", divisor, log_target), _rows(y_true)
        loss, grad = _ops.kl_div_forward(_rows(y_pred), target, *ctx.how, eps, want_grad and not ctx.late)
        if want_grad:
            origin = None if torch.compiler.is_compiling() else descendant(y_pred if y_pred.dim() else y_pred.reshape(1))
            if ctx.late:
                ctx.save_for_backward(target, y_pred.new_empty(0), origin)
            else:
                ctx.save_for_backward(grad, origin)
            ctx.shape = y_pred.shape
        return loss.view(y_pred.shape if reduction == "none" else ())

    @staticmethod
    @first_derivative_only("kl_div")
    def backward(ctx, d_loss):
        grad = None
        if ctx.needs_input_grad[0]:
            if ctx.late:
                target, like, _ = ctx.saved_tensors
                grad = _ops.kl_div_backward(_rows(d_loss), target, like, *ctx.how)
            else:
                grad = scaled(ctx.saved_tensors[0], d_loss)
            grad = grad.view(ctx.shape)
        return grad, None, None, None, None


def liger_kl_div(input, target, size_average=True, reduce=True, reduction="mean", log_target=False, eps=1e-10):
    """Kullback-Leibler divergence of predictions from a target distribution; the parameters are those of torch's function and eps.

    Each element is p (log max(p, eps) - input) with p = target, or p (target - input) with p = e^target under `log_target`; fp32 inside.
    Where p = 0 it is 0, also against -inf (torch gives NaN there).

    Args:
        input: [..., V] log-probabilities, fp32, bf16 or fp16, any strides; usually (tokens, V).
        target: input's shape, probabilities, or log-probabilities; one of those dtypes, input's own or not. Takes no gradient.
        size_average, reduce: ignored, as torch deprecates them.
        reduction: "none", "sum", "mean" (over all elements) or "batchmean" (over the first dimension).
        log_target: whether target holds log-probabilities.
        eps: least probability of which the logarithm is taken; without effect under `log_target`.

    Returns:
        fp32: of input's shape for "none", else one number; 0 when there are no elements. The gradient, -p times the reduction's factor,
        is in input's dtype.

    Raises:
        KeyError: another reduction.
        ValueError: shapes that differ.
        RuntimeError (ValueError before torch 2.12): tensors on different devices, or of another dtype.
    """
    return LigerKLDivLossFunction.apply(input, target, reduction, log_target, eps)


class LigerKLDIVLoss(torch.nn.KLDivLoss):
    """torch.nn.KLDivLoss (whose arguments follow `eps`) on :func:`liger_kl_div`."""

    def __init__(self, eps=1e-10, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred, y_true):
        return LigerKLDivLossFunction.apply(y_pred, y_true, self.reduction, self.log_target, self.eps)
