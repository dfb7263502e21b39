"""KL divergence between given probabilities and the softmax of a linear layer's output, without its logits. The chunk loop and the kernels
are those of :mod:`liger_kernel.ops.fused_linear_jsd`."""

import torch

from liger_kernel.backends import registry, third_party
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_backward
from liger_kernel.ops.fused_linear_jsd import (
    as_constants,
    check_accum_dtype,
    check_temperature,
    forward_and_save,
    run,
    scaled_gradients,
)

EXPORTS = ["LigerFusedLinearKLDivFunction", "fused_linear_kl_div_forward", "fused_linear_kl_div_backward"]

_OP = "fused_linear_kl_div"
_REDUCTIONS = ("batchmean", "mean", "sum")


def _options(student_weight, target, shift_labels, reduction, ignore_index, temperature, eps, accum_dtype):
    """The options of `run`. AssertionError, ValueError as of :func:`liger_fused_linear_kl_div`."""
    check_temperature(_OP, temperature)
    check_accum_dtype(_OP, accum_dtype)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{_OP}: reduction is {reduction!r}, expected one of {_REDUCTIONS}")
    if shift_labels is not None:
        assert tuple(shift_labels.shape) == (target.shape[0],), (
            f"{_OP}: shift_labels has shape {tuple(shift_labels.shape)}, expected ({target.shape[0]},)")
    return {"divergence": "probabilities", "ignore_index": ignore_index, "temperature": temperature, "eps": eps, "mean": reduction != "sum",
            "factor": 1.0 / student_weight.shape[0] if reduction == "mean" else 1.0}


class LigerFusedLinearKLDivFunction(torch.autograd.Function):
    """`apply(student_input, student_weight, target, shift_labels=None, reduction="batchmean", ignore_index=-100, temperature=1.0,
    eps=1e-10, accum_dtype=None)` -> loss; see :func:`liger_fused_linear_kl_div`."""

    @classmethod
    def apply(cls, *arguments):
        return super().apply(*as_constants(*arguments))

    @staticmethod
    def forward(ctx, student_input, student_weight, target, shift_labels=None, reduction="batchmean", ignore_index=-100, temperature=1.0,
                eps=1e-10, accum_dtype=None):
        options = _options(student_weight, target, shift_labels, reduction, ignore_index, temperature, eps, accum_dtype)
        return forward_and_save(ctx, (*ctx.needs_input_grad[:2], False), _OP, student_input, student_weight, None, target, None, None,
                                shift_labels, **options)[0]

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, d_loss):
        dx, dw, _ = scaled_gradients(ctx, d_loss)
        return (dx, dw) + (None,) * 7


def fused_linear_kl_div_forward(student_input, student_weight, target, shift_labels, reduction, ignore_index, has_label, temperature, eps,
                                accum_dtype=None):
    """(loss, grad_input, grad_weight) without autograd; a gradient that its tensor does not require is None. Without `has_label` the
    labels are not looked at."""
    labels = shift_labels if has_label else None
    options = _options(student_weight, target, labels, reduction, ignore_index, temperature, eps, accum_dtype)
    loss, _, _, dx, dw, _ = run(_OP, student_input, student_weight, None, target, None, None, labels,
                                wanted=(student_input.requires_grad, student_weight.requires_grad, False), **options)
    return loss, None if dx is None else dx.to(student_input.dtype), None if dw is None else dw.to(student_weight.dtype)


def fused_linear_kl_div_backward(grad_output, grad_input, grad_weight):
    """Both gradients of :func:`fused_linear_kl_div_forward` times the scalar `grad_output`, which stays on the device."""
    return fused_linear_cross_entropy_backward(grad_output, grad_input, grad_weight, None)[:2]


def liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels=None, reduction="batchmean", ignore_index=-100,
                              temperature=1.0, eps=1e-10, accum_dtype=None):
    """KL(target || softmax(student_input student_weight^T / temperature)), without the student's (BT, V) logits.

    A row's loss is sum_v q_v (log max(q_v, eps) - log softmax_v), q being its row of `target`.

    Args:
        student_input: (BT, H), fp32, bf16 or fp16, any strides.
        student_weight: (V, H). Under autocast both are used in its dtype, otherwise in the wider of the two.
        target: (BT, V) probabilities (not their logarithms), fp32, bf16 or fp16; they need not sum to one. No gradient.
        shift_labels: (BT,) integers or None. Rows whose label is `ignore_index` count for nothing, and are not worked on.
        reduction: "batchmean" divides the sum over rows by the number n of rows that count, "mean" by n V, "sum" by nothing.
        temperature: divides the logits.
        eps: the least probability inside the logarithm.
        accum_dtype: accepted; the weight's gradient is always summed in fp32.

    Returns:
        An fp32 scalar, 0 when no row counts. A gradient is made only where its tensor requires it, in its dtype.

    Raises:
        AssertionError: temperature is not positive; shift_labels is not (BT,).
        ValueError: another reduction or accum_dtype; shapes that do not fit.
    """
    if registry.choosing and (other := third_party("fused_linear_kl_div", student_input)) is not None:
        return other(student_input, student_weight, target, shift_labels, reduction, ignore_index, temperature, eps)
    return LigerFusedLinearKLDivFunction.apply(student_input, student_weight, target, shift_labels, reduction, ignore_index, temperature,
                                               eps, accum_dtype)


class LigerFusedLinearKLDivLoss(torch.nn.Module):
    """:func:`liger_fused_linear_kl_div` as a module."""

    def __init__(self, reduction="batchmean", ignore_index=-100, temperature=1.0, eps=1e-10, accum_dtype=None):
        super().__init__()
        check_temperature(_OP, temperature)
        self.reduction, self.ignore_index, self.temperature, self.eps, self.accum_dtype = (
            reduction, ignore_index, temperature, eps, accum_dtype)

    def forward(self, student_input, student_weight, target, shift_labels=None):
        return liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels, self.reduction, self.ignore_index,
                                         self.temperature, self.eps, self.accum_dtype)

    def extra_repr(self):
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, temperature={self.temperature}, eps={self.eps}"
