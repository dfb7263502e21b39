"""Generalised Jensen-Shannon divergence between log-probabilities of a student and a teacher (Lin 1991; as a distillation loss: Agarwal
et al. 2024, "On-Policy Distillation of Language Models")."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.backends import registry, third_party
from liger_kernel.core.autograd import descendant, first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import as_rows, check_dtypes, gather_dtensor
from liger_kernel.ops.cross_entropy import labels

EXPORTS = ["LigerJSDFunction", "NativeJSDFunction", "jsd_forward", "jsd_backward"]

# Names of the reference package's implementations and modes; all mean the one there is for the tensors' device.
_IMPLEMENTATIONS = {None, "cuda", "cpu", "triton", "cutile", "cutedsl", "nvidia-triton", "nvidia-cutile", "nvidia-cutedsl"}
_MODES = {None, "default", "standard", "static_persistent", "multi_wave_cached", "chunked"}


@register_fake("liger_kernel::jsd_forward")
def _(log_q, log_p, target, stats, ignore_index, beta, scale, want_dx):
    return (log_q.new_empty((log_q.shape[0],), dtype=torch.float32),
            log_q.new_empty((log_q.shape[0] if want_dx else 0, log_q.shape[1])))


def check_hints(op, device, jsd_impl, jsd_mode):
    """ValueError for names that mean nothing, RuntimeError for an implementation of another device than the tensors'."""
    if jsd_impl not in _IMPLEMENTATIONS:
        raise ValueError(f"{op}: jsd_impl is {jsd_impl!r}, expected None or one of {sorted(_IMPLEMENTATIONS - {None})}")
    if jsd_impl in ("cuda", "cpu") and jsd_impl != device.type:
        raise RuntimeError(f"{op}: jsd_impl is {jsd_impl!r}, but the tensors lie on {device.type}")
    if jsd_mode not in _MODES:
        raise ValueError(f"{op}: jsd_mode is {jsd_mode!r}, expected None or one of {sorted(_MODES - {None})}")


def check_beta(op, beta):
    """ValueError unless `beta` lies in [0, 1]."""
    if not 0 <= beta <= 1:
        raise ValueError(f"{op}: beta is {beta}, expected a number in [0, 1] (0: forward KL, 1: reverse KL)")


def _forward(x, y, target, beta, ignore_index, want_dx):
    """(loss [], gradient rows or None, 1 / n or None) on rows. fp16: the gradient of a mean falls below the smallest number, so it is
    kept without its factor 1 / n, a tensor [] that is returned."""
    check_beta("jsd", beta)
    if x.shape != y.shape:
        raise ValueError(f"jsd: the input is {tuple(x.shape)}, the target {tuple(y.shape)}; they must be equal")
    stats, scale = None, 1.0 / max(x.shape[0], 1)
    if target is not None:
        target = labels.indices("jsd", target)
        stats, scale = labels.ask(target, x.shape[1], ignore_index).device, 1.0
    apart = None
    if want_dx and x.dtype == torch.float16:
        apart = torch.full((), scale, device=x.device) if stats is None else stats[:1].view(torch.float32).reshape(())
        stats, scale = None, 1.0
    loss, dx = _ops.jsd_forward(x, y, target, stats, ignore_index, beta, scale, want_dx)
    loss = loss.sum()
    return loss if apart is None else loss * apart, dx if want_dx else None, apart


def _as_pair(_input, target):
    """Both as rows of one dtype, the wider of the two."""
    check_dtypes("jsd", _input, target)
    x, y = as_rows(_input.detach()), as_rows(target.detach())
    if x.dtype != y.dtype:
        wide = torch.promote_types(x.dtype, y.dtype)
        x, y = (t if t.dtype == wide else t.to(wide) for t in (x, y))
    return x, y


def _check_labels(shift_labels, rows):
    if shift_labels is not None:
        assert tuple(shift_labels.shape) == (rows,), f"jsd: shift_labels has shape {tuple(shift_labels.shape)}, expected ({rows},)"


class NativeJSDFunction(torch.autograd.Function):
    """Our implementation of :class:`LigerJSDFunction`, whatever is chosen."""

    @classmethod
    def apply(cls, _input, target, shift_labels=None, *options):
        if not torch.is_grad_enabled():  # forward cannot see this; without it a gradient would be made for nobody
            _input = _input.detach()
        return super().apply(gather_dtensor(_input), gather_dtensor(target.detach()), gather_dtensor(shift_labels), *options)

    @staticmethod
    def forward(ctx, _input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None):
        check_hints("jsd", _input.device, jsd_impl, jsd_mode)
        x, y = _as_pair(_input, target)
        _check_labels(shift_labels, x.shape[0])
        want_dx = ctx.needs_input_grad[0]
        loss, dx, apart = _forward(x, y, shift_labels, beta, ignore_index, want_dx)
        if want_dx:
            ctx.save_for_backward(dx, apart, None if torch.compiler.is_compiling() else descendant(_input))
            ctx.shape, ctx.dtype = _input.shape, _input.dtype
        return loss if _input.dtype == torch.float32 else loss.to(_input.dtype)

    @staticmethod
    @first_derivative_only("jsd")
    def backward(ctx, d_loss):
        grad = None
        if ctx.needs_input_grad[0]:
            dx, apart, _ = ctx.saved_tensors
            factor = d_loss.float() if apart is None else d_loss.float() * apart
            grad = jsd_backward(dx, factor).view(ctx.shape)
            grad = grad if grad.dtype == ctx.dtype else grad.to(ctx.dtype)
        return (grad,) + (None,) * 6


class LigerJSDFunction(NativeJSDFunction):
    """`apply(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None)` -> loss; see
    :func:`liger_jsd`."""

    @classmethod
    def apply(cls, _input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None):
        if registry.choosing and (jsd_impl is None or registry.get_registered("jsd", jsd_impl)):  # other names are check_hints' to judge
            other = third_party("jsd", _input, jsd_impl)
            if other is not None:
                return other(_input, target, shift_labels, beta, ignore_index, **({} if jsd_mode is None else {"mode": jsd_mode}))
        return super().apply(_input, target, shift_labels, beta, ignore_index, jsd_impl, jsd_mode)


def jsd_forward(_input, target, shift_labels, beta, ignore_index, has_label, jsd_impl=None, jsd_mode=None):
    """(loss, gradient of the input) without autograd; without `has_label` the labels are not looked at."""
    check_hints("jsd", _input.device, jsd_impl, jsd_mode)
    x, y = _as_pair(_input, target)
    shift_labels = shift_labels if has_label else None
    _check_labels(shift_labels, x.shape[0])
    loss, dx, apart = _forward(x, y, shift_labels, beta, ignore_index, True)
    if apart is not None:
        dx = _ops.cross_entropy_scale(dx, apart)
    return loss.to(_input.dtype), dx.to(_input.dtype).view(_input.shape)


def jsd_backward(dX, grad_output):
    """The gradient `dX` [rows, V] times the scalar `grad_output`, which stays on the device. Inside a backward pass whose graph is not
    kept it is overwritten (a factor of 1 touches nothing); otherwise it is copied."""
    factor = grad_output.detach().reshape(()).float()
    rows = as_rows(dX)
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return _ops.cross_entropy_scale(rows, factor).view(dX.shape)
    _ops.cross_entropy_scale_(rows, factor)
    torch.autograd.graph.increment_version(dX)
    return dX


def liger_jsd(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    """Generalised Jensen-Shannon divergence of log-probabilities, averaged over rows.

    With Q = exp(input), P = exp(target), M = beta P + (1 - beta) Q, summed over the vocabulary in fp32:
    beta KL(P || M) + (1 - beta) KL(Q || M); beta = 0 is KL(P || Q), beta = 1 is KL(Q || P). A probability of 0 takes no part.

    Args:
        input: (BT, V) log-probabilities of the student, fp32, bf16 or fp16, any strides. They count as free variables: the gradient
            does not assume that they sum to one.
        target: (BT, V) log-probabilities of the teacher; no gradient.
        shift_labels: (BT,) integers or None. Rows whose label is `ignore_index` count for nothing.
        beta: in [0, 1].
        ignore_index: any integer.

    Returns:
        A scalar of input's dtype: the sum over rows divided by the number of rows that count, 0 when there are none.

    Raises:
        AssertionError: shift_labels is not (BT,).
        ValueError: beta outside [0, 1]; input and target of different shapes.
        RuntimeError: labels that are not integers, other dtypes, tensors on different devices.
    """
    if registry.choosing and (other := third_party("jsd", input)) is not None:  # here too: torch.compile does not see apply's choice
        return other(input, target, shift_labels, beta, ignore_index)
    return LigerJSDFunction.apply(input, target, shift_labels, beta, ignore_index)


class LigerJSD(torch.nn.Module):
    """:func:`liger_jsd` as a module; `forward(log_q, log_p, shift_labels=None)`, the student first."""

    def __init__(self, beta=0.5, ignore_index=-100):
        super().__init__()
        check_beta("jsd", beta)
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q, log_p, shift_labels=None):
        return liger_jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)

    def extra_repr(self):
        return f"beta={self.beta}, ignore_index={self.ignore_index}"
