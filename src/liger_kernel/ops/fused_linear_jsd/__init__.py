"""Distillation of a linear layer's output without its logits: rows of student and teacher go through in chunks, whose gradients are formed
at once. :func:`distill` serves every loss of this kind; this folder's own is the Jensen-Shannon divergence."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.backends import registry, third_party
from liger_kernel.core.autograd import descendant, first_derivative_only, without_gradient
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import as_rows, check_dtypes, gather_dtensor, product_dtype, unit_stride
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_backward
from liger_kernel.ops.jsd import check_beta, check_hints

EXPORTS = ["LigerFusedLinearJSDFunction", "fused_linear_jsd_forward", "fused_linear_jsd_backward"]

_OP = "fused_linear_jsd"
_DIVERGENCES = {"jsd": 0, "cosine": 1, "probabilities": 2}
_SUMS = (None, torch.float32, torch.bfloat16, torch.float16)


@register_fake("liger_kernel::fused_linear_jsd_forward")
def _(x, weight, bias, teacher, teacher_weight, teacher_bias, target, stats, valid_rows, logits_bytes, divergence, ignore_index, beta,
      temperature, eps, soft_scale, hard_scale, want_hard, want_dx, want_dw, want_db, dw_fp32):
    rows, vocab, hidden = x.shape[0], weight.shape[0], x.shape[1]
    return (x.new_empty((rows,), dtype=torch.float32), x.new_empty((rows if want_hard else 0,), dtype=torch.float32),
            x.new_empty((rows if want_dx else 0, hidden)),
            x.new_empty((vocab if want_dw else 0, hidden), dtype=torch.float32 if dw_fp32 else x.dtype),
            x.new_empty((vocab if want_db else 0,), dtype=torch.float32))


def check_temperature(op, temperature):
    """AssertionError unless positive."""
    assert temperature > 0, f"{op}: temperature is {temperature}, expected a positive number"


def check_accum_dtype(op, accum_dtype):
    """ValueError unless None or a float type that gradients may be summed in; all of them mean fp32 here."""
    if accum_dtype not in _SUMS:
        raise ValueError(f"{op}: accum_dtype is {accum_dtype!r}, expected None, torch.float32, torch.bfloat16 or torch.float16")


def _check_shapes(op, x, weight, teacher, teacher_weight, target, hard):
    """ValueError where shapes do not fit one another; the kernels' own checks name rows and columns they cannot use."""
    rows = x.shape[:-1].numel()
    if teacher.shape[:-1].numel() != rows:
        raise ValueError(f"{op}: the teacher has {teacher.shape[:-1].numel()} rows, the student {rows}; they must be equal")
    vocab, other = weight.shape[0], teacher.shape[-1] if teacher_weight is None else teacher_weight.shape[0]
    if teacher_weight is None and other != vocab:
        raise ValueError(f"{op}: there are {other} probabilities a row, the student's vocabulary has {vocab}; they must be equal")
    if other < vocab:
        raise ValueError(f"{op}: the teacher's vocabulary has {other} entries, the student's {vocab}; a teacher must not have fewer (cut "
                         "the student's weight, or pad the teacher's)")
    if target is None and hard:
        raise ValueError(f"{op}: the hard loss needs labels")
    if target is not None and target.numel() != rows:
        raise ValueError(f"{op}: there are {target.numel()} labels, the student has {rows} rows; they must be equal")


def run(op, x, weight, bias, teacher, teacher_weight, teacher_bias, target, stats=None, count=None, wanted=(False,) * 3, divergence="jsd",
        beta=0.5, ignore_index=-100, temperature=1.0, eps=1e-10, soft_weight=1.0, hard_weight=0.0, return_parts=False, mean=True,
        factor=1.0, logits_memory=0):
    """(loss, soft, hard, dx, dw, db) without autograd; see :func:`distill`. `wanted`: which of the last three. In fp16 those of a mean
    come in fp32: before they meet the loss scaler they are too small for fp16."""
    check_temperature(op, temperature)
    if divergence == "jsd":
        check_beta(op, beta)
    hard = return_parts or hard_weight != 0
    _check_shapes(op, x, weight, teacher, teacher_weight, target, hard)
    if teacher_weight is None:  # probabilities, which no product reads
        check_dtypes(op, teacher)
        dtype = product_dtype(op, x, weight)
    else:
        dtype = product_dtype(op, x, weight, teacher, teacher_weight)

    def cast(t, rows):
        if t is None:
            return None
        t = as_rows(t.detach()) if rows else t.detach()
        return t if t.dtype == dtype else t.to(dtype)

    rows = x.shape[:-1].numel()
    inverse = torch.full((), 1.0 / max(rows, 1), device=x.device) if mean else None
    if target is not None:
        target = labels.indices(op, target.reshape(-1))
        if stats is None:
            asked = labels.ask(target, weight.shape[0], ignore_index)
            # Labels that only say which rows count may be any numbers.
            counts = asked.wait()
            count = None if counts is None else asked.count() if hard else counts[0]
            stats = asked.device
        inverse = stats[:1].view(torch.float32).reshape(()) if mean else None
    # fp16: dlogits of a mean fall below the smallest fp16 number, so they are formed n times too large and the products divided.
    enlarge = mean and dtype == torch.float16 and any(wanted)
    in_kernel = 1.0 if enlarge else factor / max(rows, 1) if mean and target is None else factor
    want_dx, want_dw, want_db = wanted
    student = cast(x, True)
    weight_rows, other_rows = (None if w is None else unit_stride(cast(w, False)) for w in (weight, teacher_weight))
    soft_rows, hard_rows, dx, dw, db = _ops.fused_linear_jsd_forward(
        student, weight_rows, None if bias is None else cast(bias, False).contiguous(),
        as_rows(teacher.detach()) if teacher_weight is None else cast(teacher, True), other_rows,
        None if teacher_bias is None else cast(teacher_bias, False).contiguous(), target, stats if mean and not enlarge else None,
        -1 if count is None else count, logits_memory, _DIVERGENCES[divergence], ignore_index, beta, temperature, eps,
        soft_weight * in_kernel, hard_weight * in_kernel, hard, want_dx, want_dw, want_db,
        dtype == torch.float32 or weight.dtype != dtype or enlarge)
    scale = factor if inverse is None else inverse * factor
    soft = soft_rows.sum() * scale
    hard = hard_rows.sum() * scale if hard else None
    loss = soft * soft_weight if soft_weight != 1 else soft
    if hard_weight != 0:
        loss = loss + hard * hard_weight
    if enlarge:
        dx, dw, db = dx.float() * scale, dw * scale, db * scale
    return loss, soft, hard, dx.view(x.shape) if want_dx else None, dw if want_dw else None, db if want_db else None


def forward_and_save(ctx, wanted, op, x, weight, bias, *rest, **options):
    """The forward of an autograd.Function: (loss, soft, hard) of :func:`run`, the gradients saved for :func:`scaled_gradients`."""
    loss, soft, hard, *grads = run(op, x, weight, bias, *rest, wanted=wanted, **options)
    ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
    trained = () if torch.compiler.is_compiling() else [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    ctx.save_for_backward(*grads, *map(descendant, trained))
    soft = soft.clone() if soft is loss else soft  # an output of its own: the loss trains, its parts do not
    return loss, soft, hard


def scaled_gradients(ctx, d_loss):
    """(dx, dw, db) that were saved, times the upstream gradient of the loss; None for those not wanted."""
    grads = fused_linear_cross_entropy_backward(d_loss, *ctx.saved_tensors[:3])
    return tuple(None if g is None else g if g.dtype == dtype else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True))


def as_constants(*tensors):
    """The tensors, gathered where they are sharded, and without gradient where none is being recorded: a forward cannot see that, and
    would make gradients for nobody."""
    tensors = (gather_dtensor(t) if isinstance(t, torch.Tensor) else t for t in tensors)
    return tuple(t.detach() if isinstance(t, torch.Tensor) and not torch.is_grad_enabled() else t for t in tensors)


class LigerFusedLinearDistillationFunction(torch.autograd.Function):
    """The autograd node behind :func:`distill`. The gradients are made in forward and nothing else is kept: backward does not read the
    weight."""

    @staticmethod
    def forward(ctx, op, x, weight, bias, teacher, teacher_weight, teacher_bias, target, stats, count, divergence, beta, ignore_index,
                temperature, eps, soft_weight, hard_weight, return_parts, mean, factor, logits_memory):
        wanted = (ctx.needs_input_grad[1], ctx.needs_input_grad[2], bias is not None and ctx.needs_input_grad[3])
        loss, soft, hard = forward_and_save(
            ctx, wanted, op, x, weight, bias, teacher, teacher_weight, teacher_bias, target, stats, count, divergence=divergence, beta=beta,
            ignore_index=ignore_index, temperature=temperature, eps=eps, soft_weight=soft_weight, hard_weight=hard_weight,
            return_parts=return_parts, mean=mean, factor=factor, logits_memory=logits_memory)
        without_gradient(ctx, soft, hard)
        return loss, soft, hard

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, d_loss, *_):
        return (None, *scaled_gradients(ctx, d_loss)) + (None,) * 17


def distill(x, weight, teacher, teacher_weight, target=None, bias=None, teacher_bias=None, *, op=_OP, divergence="jsd", beta=0.5,
            ignore_index=-100, temperature=1.0, eps=1e-10, soft_weight=1.0, hard_weight=0.0, return_parts=False, mean=True, factor=1.0,
            label_stats=None, logits_memory=0):
    """A distillation loss of x weight^T + bias against teacher teacher_weight^T + teacher_bias, neither of which is ever whole.

    Args:
        x: (..., H) fp32, bf16 or fp16, any strides.
        weight: (V, H).
        teacher: (..., H') of as many rows, or with divergence "probabilities" (..., V) of any float dtype.
        teacher_weight: (V', H') with V' >= V; None with "probabilities". Under autocast all four are used in its dtype, otherwise in the
            widest of theirs.
        target: as many labels as rows, or None. Rows whose label is `ignore_index` count for nothing, and are not worked on.
        bias, teacher_bias: (V,), (V',) or None.
        op: name for errors.
        divergence: the soft loss of a row, "jsd" (see :func:`liger_kernel.ops.jsd.liger_jsd`), "cosine" (beta times one minus the
            cosine of the logits) or "probabilities" (KL(p || softmax) of given p), of logits / temperature. Where V' > V the student's
            are 0.
        eps: with "probabilities", the least p inside the logarithm.
        soft_weight, hard_weight: of the soft loss and of the cross entropy of the student's logits, not tempered, with the labels.
        return_parts: also return both losses.
        mean: divide by the number n of rows that count.
        factor: multiplies loss, parts and gradients.
        label_stats: what `labels.ask(target.reshape(-1), V, ignore_index)` returned. Asked for before the model runs, its count is there
            when the loss begins, and nothing waits for the device.
        logits_memory: most bytes of logits held at once; 0 for the default.

    Returns:
        (loss, soft, hard): fp32 scalars. The parts, not weighted, carry no gradient; hard is None where it was not needed. No row left:
        all are 0. Gradients have the dtypes of their tensors; one is made only where its tensor requires it, and none for the teacher.

    Raises:
        AssertionError: temperature is not positive; with a hard loss, a label out of range (not under torch.compile or graph capture,
            where its loss is NaN).
        ValueError: beta outside [0, 1]; shapes that do not fit; a teacher's vocabulary smaller than the student's.
    """
    tensors = as_constants(x, weight, bias, teacher, teacher_weight, teacher_bias, target)
    stats = count = None
    if label_stats is not None:
        counts = label_stats.wait()
        count = None if counts is None else label_stats.count() if hard_weight != 0 or return_parts else counts[0]
        stats = label_stats.device
    return LigerFusedLinearDistillationFunction.apply(
        op, *tensors, stats, count, divergence, beta, ignore_index, temperature, eps, soft_weight, hard_weight, return_parts, mean, factor,
        logits_memory)


def _check_labels(shift_labels, rows):
    if shift_labels is not None:
        assert tuple(shift_labels.shape) == (rows,), f"{_OP}: shift_labels has shape {tuple(shift_labels.shape)}, expected ({rows},)"


class LigerFusedLinearJSDFunction(torch.autograd.Function):
    """`apply(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
    temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None)` -> loss; see :func:`liger_fused_linear_jsd`."""

    @classmethod
    def apply(cls, *arguments):
        return super().apply(*as_constants(*arguments))

    @staticmethod
    def forward(ctx, student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
                temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None):
        check_accum_dtype(_OP, accum_dtype)
        check_hints(_OP, student_input.device, jsd_impl, jsd_mode)
        _check_labels(shift_labels, teacher_input.shape[0])
        return forward_and_save(
            ctx, (*ctx.needs_input_grad[:2], False), _OP, student_input, student_weight, None, teacher_input, teacher_weight, None,
            shift_labels, beta=jsd_beta, ignore_index=ignore_index, temperature=temperature)[0]

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, d_loss):
        dx, dw, _ = scaled_gradients(ctx, d_loss)
        return (dx, dw) + (None,) * 9


def fused_linear_jsd_forward(student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, has_label,
                             temperature, accum_dtype=None, *, jsd_impl=None, jsd_mode=None):
    """(loss, grad_input, grad_weight) without autograd; a gradient that its tensor does not require is None. Without `has_label` the
    labels are not looked at."""
    check_accum_dtype(_OP, accum_dtype)
    check_hints(_OP, student_input.device, jsd_impl, jsd_mode)
    target = shift_labels if has_label else None
    _check_labels(target, teacher_input.shape[0])
    wanted = (student_input.requires_grad, student_weight.requires_grad, False)
    loss, _, _, dx, dw, _ = run(_OP, student_input, student_weight, None, teacher_input, teacher_weight, None, target, wanted=wanted,
                                beta=jsd_beta, ignore_index=ignore_index, temperature=temperature)
    return (loss, None if dx is None else dx.to(student_input.dtype), None if dw is None else dw.to(student_weight.dtype))


def fused_linear_jsd_backward(grad_output, grad_input, grad_weight):
    """Both gradients of :func:`fused_linear_jsd_forward` times the scalar `grad_output`, which stays on the device."""
    return fused_linear_cross_entropy_backward(grad_output, grad_input, grad_weight, None)[:2]


def liger_fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
                           temperature=1.0, accum_dtype=None):
    """Generalised Jensen-Shannon divergence between the tempered softmax of two linear layers' outputs, averaged over rows, without
    the (BT, V) logits. Formulas: :func:`liger_kernel.ops.jsd.liger_jsd`.

    Args:
        student_input: (BT, Hs), fp32, bf16 or fp16, any strides.
        student_weight: (V, Hs).
        teacher_input: (BT, Ht).
        teacher_weight: (V, Ht).
        shift_labels: (BT,) integers or None. Rows whose label is `ignore_index` count for nothing, and are not worked on.
        jsd_beta: in [0, 1]; 0 is KL(teacher || student), 1 the reverse.
        temperature: divides both logits.
        accum_dtype: accepted; the weight's gradient is always summed in fp32.

    Returns:
        The loss, an fp32 scalar: the sum over the rows that count divided by their number, 0 when there are none. Only student_input and
        student_weight have gradients, each made only where it is required.

    Raises:
        AssertionError: shift_labels is not (BT,); temperature is not positive.
        ValueError: jsd_beta outside [0, 1]; shapes that do not fit; another accum_dtype.
    """
    if registry.choosing and (other := third_party("fused_linear_jsd", student_input)) is not None:
        return other(student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, temperature)
    return LigerFusedLinearJSDFunction.apply(student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta,
                                             ignore_index, temperature, accum_dtype)


class LigerFusedLinearJSD(torch.nn.Module):
    """:func:`liger_fused_linear_jsd` as a module."""

    def __init__(self, jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None):
        super().__init__()
        check_temperature(_OP, temperature)
        self.jsd_beta, self.ignore_index, self.temperature, self.accum_dtype = jsd_beta, ignore_index, temperature, accum_dtype

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, shift_labels):
        return liger_fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels, self.jsd_beta,
                                      self.ignore_index, self.temperature, self.accum_dtype)

    def extra_repr(self):
        return f"jsd_beta={self.jsd_beta}, ignore_index={self.ignore_index}, temperature={self.temperature}"
