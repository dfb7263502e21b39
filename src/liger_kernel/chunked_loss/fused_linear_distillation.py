"""Distillation of a student's hidden states against a teacher's through both heads, a chunk of tokens at a time: the base class for losses
written in Python, and what the built-in ones, which run in one kernel, share."""

import inspect

import torch
import torch.nn.functional as F

from liger_kernel.core.autograd import descendant, first_derivative_only, without_gradient
from liger_kernel.ops.fused_linear_jsd import as_constants, check_temperature, distill, forward_and_save, scaled_gradients

EXPORTS = ["LigerFusedLinearDistillationBase"]

_DEFAULT_CHUNK = 1024


def _known(function, options):
    """Those of `options` that `function` takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def _soft_loss(cls, student, teacher, target, ignore_index, temperature, options):
    """The sum of `distillation_loss_fn` over a chunk of logits, tempered in fp32; a student of fewer entries is extended with zeros."""
    student, teacher = student.float() / temperature, teacher.float() / temperature
    if student.shape[-1] != teacher.shape[-1]:
        student = F.pad(student, (0, teacher.shape[-1] - student.shape[-1]))
    function = cls.distillation_loss_fn
    return function(student, teacher, **_known(function, {"target": target, "ignore_index": ignore_index, **options}))


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """Base of distillation losses defined by a Python function of logits. A subclass defines `distillation_loss_fn`, and a `forward` that
    names its own arguments and calls `super().forward(cls=cls, ctx=ctx, ...)`; `backward` is inherited.

    Tokens go through in chunks: the chunk's logits, the loss and its gradients live only while it is worked on. Gradients are made in
    forward, each only where its tensor requires one, and summed in fp32; backward does not read the weight.
    """

    @classmethod
    def apply(cls, *arguments):
        return super().apply(*as_constants(*arguments))

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, **loss_kwargs):
        """The soft loss, summed over the tokens of a chunk.

        Args:
            student_logits, teacher_logits: (chunk, V') fp32, divided by the temperature.
            target: (chunk,) labels; tokens of `ignore_index` must not count.
        """
        raise NotImplementedError("a subclass of LigerFusedLinearDistillationBase has to define distillation_loss_fn")

    @staticmethod
    def chunk_forward(student_input_chunk, student_weight, teacher_input_chunk, teacher_weight, target_chunk, student_bias=None,
                      teacher_bias=None, ignore_index=-100, compute_ce_loss=True):
        """(student logits, teacher logits, cross entropy of the student's logits summed over the labels that are not ignored, or 0)."""
        student_logits = F.linear(student_input_chunk, student_weight, student_bias)
        with torch.no_grad():
            teacher_logits = F.linear(teacher_input_chunk, teacher_weight, teacher_bias)
        hard = student_logits.new_zeros((), dtype=torch.float32)
        if compute_ce_loss:
            hard = F.cross_entropy(student_logits.float(), target_chunk, reduction="sum", ignore_index=ignore_index)
        return student_logits, teacher_logits, hard

    @staticmethod
    def forward(cls, ctx, student_input, student_weight, teacher_input, teacher_weight, target, student_bias=None,  # noqa: PLW0211
                teacher_bias=None, chunk_size=_DEFAULT_CHUNK, ignore_index=-100, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5,
                compute_ce_loss=True, temperature=1.0, compiled=True, return_soft_hard_loss=False, **loss_kwargs):
        """The loss, or (loss, soft, hard): fp32 scalars, divided by the number of labels that are not ignored.

        Args:
            cls: the class whose `distillation_loss_fn` and `chunk_forward` are used.
            student_input: (..., Hs); student_weight (V, Hs); student_bias (V,) or None.
            teacher_input: (..., Ht) of as many tokens; teacher_weight (V', Ht), V' >= V; teacher_bias (V',) or None.
            target: as many labels as tokens.
            chunk_size: tokens worked on at once.
            weight_hard_loss, weight_soft_loss: of the cross entropy with the labels and of `distillation_loss_fn`.
            beta, loss_kwargs: handed to `distillation_loss_fn` where it takes them.
            compute_ce_loss: False leaves out the hard loss, as does a weight of 0 where it is not returned.
            temperature: divides the logits of the soft loss.
            compiled: accepted; changes nothing.
            return_soft_hard_loss: also return both losses, not weighted and without gradient.

        Raises:
            ValueError: the teacher's vocabulary is smaller than the student's; numbers of tokens or labels that differ.
            AssertionError: temperature is not positive.
        """
        check_temperature("fused_linear_distillation", temperature)
        if teacher_weight.shape[0] < student_weight.shape[0]:
            raise ValueError(f"fused_linear_distillation: the teacher's vocabulary has {teacher_weight.shape[0]} entries, the student's "
                             f"{student_weight.shape[0]}; a teacher must not have fewer (cut the student's weight, or pad the teacher's)")
        shape = student_input.shape
        x, other = (t.detach().reshape(-1, t.shape[-1]) for t in (student_input, teacher_input))
        target = target.detach().reshape(-1)
        if not x.shape[0] == other.shape[0] == target.shape[0]:
            raise ValueError(f"fused_linear_distillation: the student has {x.shape[0]} tokens, the teacher {other.shape[0]}, and there are "
                             f"{target.shape[0]} labels; they must be equal")
        parameters = [student_input, student_weight, student_bias]
        wanted = [t is not None and t.requires_grad for t in parameters]
        weight, bias = (None if t is None else t.detach().requires_grad_(w) for t, w in zip(parameters[1:], wanted[1:], strict=True))
        dx = torch.zeros_like(x) if wanted[0] else None
        dw, db = (torch.zeros(t.shape, dtype=torch.float32, device=x.device) if w else None
                  for t, w in zip(parameters[1:], wanted[1:], strict=True))
        n = (target != ignore_index).sum().clamp(min=1)
        with_hard = compute_ce_loss and (weight_hard_loss != 0 or return_soft_hard_loss)
        soft = hard = torch.zeros((), device=x.device)
        teacher_weight, teacher_bias = (None if t is None else t.detach() for t in (teacher_weight, teacher_bias))
        for begin in range(0, x.shape[0], max(int(chunk_size), 1)):
            part = slice(begin, begin + max(int(chunk_size), 1))
            inputs = x[part].detach().requires_grad_(wanted[0])
            with torch.set_grad_enabled(any(wanted)):
                student_logits, teacher_logits, hard_sum = cls.chunk_forward(
                    inputs, weight, other[part], teacher_weight, target[part], bias, teacher_bias, ignore_index=ignore_index,
                    compute_ce_loss=with_hard)
                soft_sum = _soft_loss(cls, student_logits, teacher_logits, target[part], ignore_index, temperature,
                                      {"beta": beta, **loss_kwargs})
                total = weight_soft_loss * soft_sum + weight_hard_loss * hard_sum if with_hard else weight_soft_loss * soft_sum
                total = total / n
            if any(wanted):
                leaves = [t for t, w in zip((inputs, weight, bias), wanted, strict=True) if w]
                found = iter(torch.autograd.grad(total, leaves, allow_unused=True))
                for sums, w in zip((None if dx is None else dx[part], dw, db), wanted, strict=True):
                    gradient = next(found) if w else None
                    if gradient is not None:
                        sums.add_(gradient)
            soft, hard = soft + soft_sum.detach().float(), hard + hard_sum.detach().float()
        soft, hard = soft / n, hard / n
        loss = weight_soft_loss * soft + weight_hard_loss * hard if with_hard else weight_soft_loss * soft
        grads = [None if g is None else g.to(t.dtype) for g, t in zip((dx, dw, db), parameters, strict=True)]
        trained = [t for t, w in zip(parameters, wanted, strict=True) if w]
        ctx.dtypes = tuple(None if t is None else t.dtype for t in parameters)
        ctx.save_for_backward(None if dx is None else grads[0].view(shape), *grads[1:], *map(descendant, trained))
        if not return_soft_hard_loss:
            return loss
        soft, hard = soft.clone(), hard.clone()  # outputs of their own
        without_gradient(ctx, soft, hard)
        return loss, soft, hard

    @staticmethod
    @first_derivative_only("fused_linear_distillation")
    def backward(ctx, grad_output, *_):
        """Gradients of student_input, student_weight, teacher_input, teacher_weight, target, student_bias; None after."""
        dx, dw, db = scaled_gradients(ctx, grad_output)
        return (dx, dw, None, None, None, db) + (None,) * max(len(ctx.needs_input_grad) - 6, 0)


def _op(divergence):
    return f"fused_linear_{divergence}_loss"


def _logits_memory(chunk_size, student_input, student_weight, teacher_weight):
    """Bytes of logits for `distill`; 0 for its default. Its own chunks are larger than `chunk_size`'s default where that pays; a smaller
    one asks for less memory."""
    row = (student_weight.shape[0] + teacher_weight.shape[0]) * student_input.element_size()
    return chunk_size * row if chunk_size < _DEFAULT_CHUNK else 0


class BuiltInDistillation(LigerFusedLinearDistillationBase):
    """Base of the losses that the kernels know. A subclass of one that defines another `distillation_loss_fn`, `chunk_forward` or
    `backward` runs through the base class in Python."""

    divergence = None  # its name in `liger_kernel.ops.fused_linear_jsd`; set beside the distillation_loss_fn that it stands for
    in_kernels = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        home = next(c for c in cls.__mro__ if "divergence" in vars(c))
        same = (inspect.getattr_static(cls, name) is inspect.getattr_static(home, name)
                for name in ("distillation_loss_fn", "chunk_forward", "backward"))
        cls.in_kernels = cls.divergence is not None and all(same)

    @classmethod
    def forward(cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
                weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True,
                chunk_size=_DEFAULT_CHUNK, return_soft_hard_loss=False):
        if not cls.in_kernels:
            return super().forward(
                cls=cls, ctx=ctx, student_input=student_input, student_weight=student_weight, teacher_input=teacher_input,
                teacher_weight=teacher_weight, target=true_labels, student_bias=student_bias, teacher_bias=teacher_bias,
                chunk_size=chunk_size, ignore_index=ignore_index, weight_hard_loss=weight_hard_loss, weight_soft_loss=weight_soft_loss,
                beta=beta, temperature=temperature, compiled=compiled, return_soft_hard_loss=return_soft_hard_loss)
        wanted = (*ctx.needs_input_grad[:2], student_bias is not None and ctx.needs_input_grad[5])
        loss, soft, hard = forward_and_save(
            ctx, wanted, _op(cls.divergence), student_input, student_weight, student_bias, teacher_input, teacher_weight, teacher_bias,
            true_labels, divergence=cls.divergence, beta=beta, ignore_index=ignore_index, temperature=temperature,
            soft_weight=weight_soft_loss, hard_weight=weight_hard_loss, return_parts=return_soft_hard_loss,
            logits_memory=_logits_memory(chunk_size, student_input, student_weight, teacher_weight))
        if not return_soft_hard_loss:
            return loss
        without_gradient(ctx, soft, hard)
        return loss, soft, hard


class DistillationModule(torch.nn.Module):
    """The module form of a built-in loss; all arguments become attributes."""

    divergence = None  # its name in `liger_kernel.ops.fused_linear_jsd`

    def __init__(self, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True,
                 chunk_size=_DEFAULT_CHUNK, return_soft_hard_loss=False):
        super().__init__()
        check_temperature(type(self).__name__, temperature)
        self.weight_hard_loss, self.weight_soft_loss, self.beta, self.ignore_index = weight_hard_loss, weight_soft_loss, beta, ignore_index
        self.temperature, self.compiled, self.chunk_size, self.return_soft_hard_loss = (
            temperature, compiled, chunk_size, return_soft_hard_loss)

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, teacher_bias=None):
        """The loss, or (loss, soft, hard) with `return_soft_hard_loss`; arguments as of :class:`LigerFusedLinearDistillationBase`."""
        # Not through the Function's apply: a forward that is a class method cannot be compiled.
        results = distill(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, op=_op(self.divergence),
            divergence=self.divergence, beta=self.beta, ignore_index=self.ignore_index, temperature=self.temperature,
            soft_weight=self.weight_soft_loss, hard_weight=self.weight_hard_loss, return_parts=self.return_soft_hard_loss,
            logits_memory=_logits_memory(self.chunk_size, student_input, student_weight, teacher_weight))
        return results if self.return_soft_hard_loss else results[0]

    def extra_repr(self):
        return (f"weight_hard_loss={self.weight_hard_loss}, weight_soft_loss={self.weight_soft_loss}, beta={self.beta}, "
                f"ignore_index={self.ignore_index}, temperature={self.temperature}")
