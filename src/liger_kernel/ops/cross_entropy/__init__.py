"""Cross entropy with class weights, label smoothing, z-loss and soft cap. The gradient is formed in forward, in the same pass
over the logits that finds the loss."""

import dataclasses

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.backends import registry, third_party
from liger_kernel.core.autograd import descendant, first_derivative_only, without_gradient
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import as_rows, gather_dtensor, in_leaf, rows_apart
from liger_kernel.ops.cross_entropy import labels

EXPORTS = ["LigerCrossEntropyFunction", "cross_entropy_forward", "cross_entropy_backward"]

REDUCTIONS = ("mean", "sum", "none")


@dataclasses.dataclass
class CrossEntropyOutput:
    """Results of the cross-entropy family; fields that were not asked for are None."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


def _fake_rows(logits, want_z, want_hit, want_prediction):
    rows = logits.shape[0]

    def new(wanted, dtype):
        return logits.new_empty((rows if wanted else 0,), dtype=dtype)

    return new(True, torch.float32), new(want_z, torch.float32), new(want_hit, torch.float32), new(want_prediction, torch.int64)


@register_fake("liger_kernel::cross_entropy_forward")
def _(logits, target, class_weight, stats, row_scale, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, mean,
      token_scaling, want_grad, want_z, want_hit, want_prediction):
    grad = logits.new_empty((logits.shape[0] if want_grad else 0, logits.shape[1]))
    return *_fake_rows(logits, want_z, want_hit, want_prediction), grad


@register_fake("liger_kernel::cross_entropy_forward_")
def _(logits, target, class_weight, stats, row_scale, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, mean,
      token_scaling, want_z, want_hit, want_prediction):
    return _fake_rows(logits, want_z, want_hit, want_prediction)


@register_fake("liger_kernel::cross_entropy_totals")
def _(loss, z_loss, hit, stats, like, want_z, want_hit):
    def new(wanted, dtype):
        return loss.new_empty(() if wanted else (0,), dtype=dtype)

    return new(True, like.dtype), new(want_z, like.dtype), new(want_hit, torch.float32)


@register_fake("liger_kernel::cross_entropy_scale")
def _(grad, factor):
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


@register_fake("liger_kernel::cross_entropy_scale_")
def _(grad, factor):
    return None


def check_flags(op, **flags):
    """AssertionError unless every flag is a bool."""
    for name, value in flags.items():
        assert isinstance(value, bool), f"{op}: {name} is {value!r}, expected True or False"


def check_class_weight(op, weight, vocab):
    """`weight` as contiguous fp32 [vocab], or None. AssertionError when its length or dtype does not fit."""
    if weight is None:
        return None
    assert weight.numel() == vocab, f"{op}: class weight has {weight.numel()} elements, the vocabulary has {vocab}; they must be equal"
    assert weight.is_floating_point(), f"{op}: class weight has dtype {weight.dtype}, expected a floating-point one"
    return weight.detach().reshape(-1).float().contiguous()


def _forward(x, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, flags, want_grad, in_place):
    """Launches the kernels on the rows `x`. -> loss, z_loss, accuracy, prediction, gradient buffer (those not wanted None)."""
    want_z, want_hit, want_prediction = flags
    check_flags("cross_entropy", return_z_loss=want_z, return_token_accuracy=want_hit, return_predicted_tokens=want_prediction)
    check_loss_options("cross_entropy", label_smoothing, reduction, softcap)
    weight = check_class_weight("cross_entropy", weight, x.shape[1])
    target = labels.indices("cross_entropy", target)
    stats = labels.ask(target, x.shape[1], ignore_index, weight)
    if not x.is_cuda:
        stats.count()  # at once: nothing is written when a label is out of range
    arguments = (target, weight, stats.device, None, ignore_index, label_smoothing, lse_square_scale, softcap or 0.0, 1.0,
                 reduction == "mean", False)
    if want_grad and in_place:
        loss, z, hit, prediction = _ops.cross_entropy_forward_(x, *arguments, *flags)
        grad = x
    else:
        loss, z, hit, prediction, grad = _ops.cross_entropy_forward(x, *arguments, want_grad, *flags)
    if x.is_cuda:
        stats.count()  # the kernel is under way; this waits for the counts alone
    if reduction != "none":
        loss, z, hit = _ops.cross_entropy_totals(loss, z, hit, stats.device, x, want_z, want_hit)
    # torch 2.11's compiler sends the gradient astray where a conversion returns its argument, so none is made without need.
    elif x.dtype != torch.float32:
        loss, z = loss.to(x.dtype), z.to(x.dtype) if want_z else z
    return (loss, z if want_z else None, hit if want_hit else None, prediction if want_prediction else None, grad if want_grad else None)


class LigerCrossEntropyFunction(torch.autograd.Function):
    """`apply(_input, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
    softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False, in_place=False)`
    -> (loss, z_loss, token_accuracy, predicted_tokens); see :func:`liger_cross_entropy`.
    """

    @classmethod
    def apply(cls, _input, target, weight=None, *options):
        if not torch.is_grad_enabled():  # forward cannot see this; without it a gradient would be made for nobody
            _input = _input.detach()
        return super().apply(gather_dtensor(_input), gather_dtensor(target), gather_dtensor(weight), *options)

    @staticmethod
    def forward(ctx, _input, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
                softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False, in_place=False):
        want_grad = ctx.needs_input_grad[0]
        x = as_rows(_input)
        compiling = torch.compiler.is_compiling()
        in_place = want_grad and in_place and not compiling and rows_apart(x)
        if in_place and in_leaf(_input):  # torch's own rule: the .grad of a parameter would share its memory
            raise RuntimeError(
                "cross_entropy: in_place=True on a leaf tensor that requires grad; pass the result of an operation, or in_place=False")
        flags = (return_z_loss, return_token_accuracy, return_predicted_tokens)
        loss, z, hit, prediction, grad = _forward(
            x, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, flags, want_grad, in_place)
        if want_grad:
            if in_place:
                torch.autograd.graph.increment_version(x)
            ctx.save_for_backward(grad, None if compiling else descendant(_input))
            ctx.shape = _input.shape
        without_gradient(ctx, z, hit, prediction)
        return loss, z, hit, prediction

    @staticmethod
    @first_derivative_only("cross_entropy")
    def backward(ctx, d_loss, *_):
        grad = None
        if ctx.needs_input_grad[0]:
            saved, _ = ctx.saved_tensors
            factor = d_loss.contiguous()
            # A graph that is kept may be run again: its saved gradient stays as it is.
            if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
                grad = _ops.cross_entropy_scale(saved, factor)
            else:
                _ops.cross_entropy_scale_(saved, factor)
                torch.autograd.graph.increment_version(saved)
                grad = saved
            grad = grad.view(ctx.shape)
        return (grad,) + (None,) * 11


def _torch_call(input, target, weight, ignore_index, reduction, label_smoothing, ours):
    """Calls that torch knows and the kernels do not: class probabilities, inputs of other than two dimensions."""
    asked = [name for name, value in ours.items() if value]
    if asked:
        raise ValueError(
            f"cross_entropy: {', '.join(asked)} need logits (rows, classes) and class indices (rows,), not input "
            f"{tuple(input.shape)} and target {tuple(target.shape)} {target.dtype}"
        )
    return torch.nn.functional.cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


def liger_cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
                        label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, return_token_accuracy=False,
                        return_predicted_tokens=False, *, in_place=False):
    """Cross entropy between logits and class indices; the first eight parameters are those of torch's function.

    Per row, in fp32, with x = softcap tanh(logit / softcap), lse = log sum exp(x), s = label_smoothing, w = weight:
    loss = (1 - s) w_y (lse - x_y) + s / V sum_i w_i (lse - x_i), plus z = lse_square_scale lse^2.

    Args:
        input: (rows, V) logits, fp32, bf16 or fp16, any strides.
        target: (rows,) class indices, int64 (narrower integers are widened); `ignore_index` marks rows that count for nothing.
        weight: (V,) class weights or None.
        size_average, reduce: ignored, as torch deprecates them.
        ignore_index: any integer, a valid class included.
        reduction: "mean" (over the weights of the targets that are not ignored; z over their number), "sum" or "none".
        label_smoothing: in [0, 1].
        lse_square_scale: factor of the z-loss.
        softcap: positive, or None for no cap.
        return_z_loss: also return z; it is part of the loss either way, and the returned value carries no gradient.
        return_token_accuracy: also return the share of rows whose first largest logit is the target (fp32; per row for "none").
        return_predicted_tokens: also return the index of the first largest logit of each row, -1 for ignored rows.
        in_place: write the gradient over `input`, saving a buffer of its size. Autograd then refuses to run other operations
            that saved `input`. Has no effect without a gradient, under torch.compile, or where rows overlap.

    Returns:
        The loss in input's dtype (summed in fp32 and rounded once), or a :class:`CrossEntropyOutput` when another result is
        asked for. No row left: loss, accuracy and gradient are 0.

    Raises:
        AssertionError: a target out of range (not under torch.compile or graph capture, where its loss is NaN); a class
            weight of the wrong length or dtype; a flag that is not bool; an unknown reduction; label_smoothing outside [0, 1]; a
            softcap that is not positive.
        RuntimeError: targets that are not integers, other dtypes, tensors on different devices, in_place on a leaf that requires grad.
        ValueError: an option that torch's function lacks, with arguments of another form (class probabilities, (N, C, d)
            inputs), which are otherwise handed to torch.
    """
    input, target, weight = gather_dtensor(input), gather_dtensor(target), gather_dtensor(weight)
    if input.dim() != 2 or target.dim() != 1:
        ours = {"lse_square_scale": lse_square_scale, "softcap": softcap, "return_z_loss": return_z_loss,
                "return_token_accuracy": return_token_accuracy, "return_predicted_tokens": return_predicted_tokens, "in_place": in_place}
        return _torch_call(input, target, weight, ignore_index, reduction, label_smoothing, ours)
    results = LigerCrossEntropyFunction.apply(
        input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens, in_place)
    return CrossEntropyOutput(*results) if return_z_loss or return_token_accuracy or return_predicted_tokens else results[0]


class LigerCrossEntropyLoss(torch.nn.Module):
    """Cross entropy as a module; see :func:`liger_cross_entropy`."""

    def __init__(self, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean", softcap=None,
                 return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False, *, in_place=False):
        super().__init__()
        check_loss_options("cross_entropy", label_smoothing, reduction, softcap)
        self.weight, self.ignore_index, self.lse_square_scale, self.label_smoothing = (
            weight, ignore_index, lse_square_scale, label_smoothing)
        self.reduction, self.softcap, self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens, self.in_place = (
            reduction, softcap, return_z_loss, return_token_accuracy, return_predicted_tokens, in_place)

    def forward(self, _input, target):
        if registry.choosing and _input.dim() == 2 and target.dim() == 1 and (other := third_party("cross_entropy", _input)) is not None:
            wanted = self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens
            results = other(_input, target, self.weight, self.ignore_index, self.lse_square_scale, self.label_smoothing, self.reduction,
                            self.softcap, *wanted)
            if not isinstance(results, tuple) or len(results) != 4:
                raise TypeError(f"cross_entropy: the chosen implementation returned {type(results).__name__}, expected a tuple of loss, "
                                "z-loss, token accuracy and predicted tokens")
            return CrossEntropyOutput(*results) if any(wanted) else results[0]
        return liger_cross_entropy(
            _input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction, label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale, softcap=self.softcap, return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy, return_predicted_tokens=self.return_predicted_tokens,
            in_place=getattr(self, "in_place", False))

    def extra_repr(self):
        return (f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
                f"softcap={self.softcap}")


def check_loss_options(op, label_smoothing, reduction, softcap):
    """The assertions of the cross-entropy modules and functions on their options."""
    assert 0 <= label_smoothing <= 1, f"{op}: label_smoothing is {label_smoothing}, expected a number in [0, 1]"
    assert reduction in REDUCTIONS, f"{op}: reduction is {reduction!r}, expected one of {REDUCTIONS}"
    assert softcap is None or softcap > 0, f"{op}: softcap is {softcap}, expected a positive number or None"


def cross_entropy_forward(_input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
                          return_token_accuracy=False, return_predicted_tokens=False):
    """(loss, z_loss, token_accuracy, predicted_tokens, gradient buffer) without autograd; the buffer is None when `_input`
    does not require a gradient."""
    flags = (return_z_loss, return_token_accuracy, return_predicted_tokens)
    with torch.no_grad():
        return _forward(as_rows(_input), target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, flags,
                        _input.requires_grad, False)


def cross_entropy_backward(_input, grad_output):
    """The gradient buffer `_input` of :func:`cross_entropy_forward` times the upstream gradient, one number or one per row."""
    return _ops.cross_entropy_scale(_input, grad_output.detach().float().contiguous())
