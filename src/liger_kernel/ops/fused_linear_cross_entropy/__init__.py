"""Cross entropy of a linear layer's output without its logits: rows go through in chunks, whose gradients are formed at once.
The arithmetic per row is that of :mod:`liger_kernel.ops.cross_entropy`."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import descendant, first_derivative_only, without_gradient
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import as_rows, gather_dtensor, product_dtype, unit_stride
from liger_kernel.ops.cross_entropy import CrossEntropyOutput, check_class_weight, check_flags, check_loss_options, labels

EXPORTS = ["LigerFusedLinearCrossEntropyFunction", "fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"]

_OP = "fused_linear_cross_entropy"
# Names of the reference package's implementations of the loss inside a chunk; all mean the one there is for the tensors' device.
_IMPLEMENTATIONS = {None, "cuda", "cpu", "triton", "cutile", "cutedsl", "nvidia-triton", "nvidia-cutile", "nvidia-cutedsl"}
_SUMS = (None, torch.float32, torch.bfloat16, torch.float16)
_MODES = {None, "default", "standard", "static_persistent", "multi_wave_cached", "chunked"}


@register_fake("liger_kernel::fused_linear_cross_entropy_forward")
def _(x, weight, target, bias, class_weight, stats, row_scale, valid_rows, logits_bytes, chunk_mem, ignore_index, label_smoothing,
      lse_square_scale, softcap, logit_scale, mean, token_scaling, want_z, want_hit, want_prediction, want_dx, want_dw, want_db, dw_fp32,
      low_accumulation):
    rows, vocab, hidden = x.shape[0], weight.shape[0], x.shape[1]

    def new(wanted, size, dtype):
        return x.new_empty(size if wanted else (0, *size[1:]), dtype=dtype)

    return (new(True, (rows,), torch.float32), new(want_z, (rows,), torch.float32), new(want_hit, (rows,), torch.float32),
            new(want_prediction, (rows,), torch.int64), new(want_dx, (rows, hidden), x.dtype),
            new(want_dw, (vocab, hidden), torch.float32 if dw_fp32 else x.dtype), new(want_db, (vocab,), torch.float32))


def _check_hints(device, accum_dtype, ce_impl, ce_mode, chunk_mem_const):
    if accum_dtype not in _SUMS:
        raise ValueError(f"{_OP}: accum_dtype is {accum_dtype!r}, expected None, torch.float32, torch.bfloat16 or torch.float16")
    if isinstance(chunk_mem_const, bool) or not isinstance(chunk_mem_const, int) or chunk_mem_const < 1:
        raise ValueError(f"{_OP}: chunk_mem_const is {chunk_mem_const!r}, expected an integer of at least 1")
    if ce_impl not in _IMPLEMENTATIONS:
        raise ValueError(f"{_OP}: ce_impl is {ce_impl!r}, expected None or one of {sorted(_IMPLEMENTATIONS - {None})}")
    if ce_impl in ("cuda", "cpu") and ce_impl != device.type:
        raise RuntimeError(f"{_OP}: ce_impl is {ce_impl!r}, but the tensors lie on {device.type}")
    if ce_mode not in _MODES:
        raise ValueError(f"{_OP}: ce_mode is {ce_mode!r}, expected None or one of {sorted(_MODES - {None})}")


def fused_linear_cross_entropy_forward(
    _input, weight, target, ce_weight=None, bias=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
    softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False,
    return_predicted_tokens=False, token_grad_output=None, compute_gradients=None, weight_requires_grad=None, *, ce_impl=None,
    ce_mode=None, chunk_mem_const=1, bias_requires_grad=None, logit_scale=1.0, stats=None, count=None, logits_memory=0,
    compute_dtype=None,
):
    """The loss and, where wanted, its gradients, without autograd. Note `ce_weight` before `bias`.

    Args:
        token_grad_output: (BT,) upstream gradient, without which reduction "none" gives no gradients.
        compute_gradients, weight_requires_grad, bias_requires_grad: whether the gradient of each is wanted; None: as it requires one.
        stats, count: LabelStats.device and LabelStats.count() of the labels, when they have been asked for (see
            :mod:`liger_kernel.ops.cross_entropy.labels`); made here otherwise.
        logits_memory: most bytes of logits held at once; 0 for the default.
        compute_dtype: of the products, in place of autocast's.
        The others: see :func:`liger_fused_linear_cross_entropy`.

    Returns:
        (loss, z_loss, token_accuracy, predicted_tokens, grad_input, grad_weight, grad_bias); what is not wanted is None. In
        fp16 the mean's gradients come in fp32: before they meet the loss scaler they are too small for fp16.
    """
    check_flags(_OP, return_z_loss=return_z_loss, use_token_scaling=use_token_scaling, return_token_accuracy=return_token_accuracy,
                return_predicted_tokens=return_predicted_tokens)
    check_loss_options(_OP, label_smoothing, reduction, softcap)
    _check_hints(_input.device, accum_dtype, ce_impl, ce_mode, chunk_mem_const)
    assert _input.shape[-1] == weight.shape[-1], (
        f"{_OP}: the input has {_input.shape[-1]} columns, the weight {weight.shape[-1]}; they must be equal")
    ce_weight = check_class_weight(_OP, ce_weight, weight.shape[0])
    with_gradient = reduction != "none" or token_grad_output is not None
    want_dx = with_gradient and (_input.requires_grad if compute_gradients is None else compute_gradients)
    want_dw = with_gradient and (weight.requires_grad if weight_requires_grad is None else weight_requires_grad)
    want_db = with_gradient and bias is not None and (bias.requires_grad if bias_requires_grad is None else bias_requires_grad)

    dtype = compute_dtype or product_dtype(_OP, _input, weight)
    x, w = _input.detach(), weight.detach()
    if token_grad_output is not None and torch.compiler.is_compiling():  # strides are not known while a backward is traced
        x, w = x.reshape(-1, x.shape[-1]).contiguous().to(dtype), w.contiguous().to(dtype)
    else:
        x, w = as_rows(x).to(dtype), unit_stride(w).to(dtype)
    b = None if bias is None else bias.detach().to(dtype).contiguous()
    target = labels.indices(_OP, target.reshape(-1))
    if stats is None:
        asked = labels.ask(target, w.shape[0], ignore_index, ce_weight)
        stats, count = asked.device, asked.count()
    mean = reduction == "mean"
    # fp16: dlogits of a mean fall below the smallest fp16 number, so they are formed N times too large and the products divided.
    enlarge = mean and dtype == torch.float16 and (want_dx or want_dw or want_db)
    row_scale = None if token_grad_output is None else token_grad_output.detach().reshape(-1).float().contiguous()
    if enlarge:
        valid = stats[2].clamp(min=1).float()
        row_scale = valid.expand(x.shape[0]).contiguous()
    dw_fp32 = dtype == torch.float32 or weight.dtype != dtype or enlarge
    loss, z, hit, prediction, dx, dw, db = _ops.fused_linear_cross_entropy_forward(
        x, w, target, b, ce_weight, stats, row_scale, -1 if count is None else count, logits_memory, chunk_mem_const, ignore_index,
        label_smoothing, lse_square_scale, softcap or 0.0, logit_scale, mean, use_token_scaling, return_z_loss, return_token_accuracy,
        return_predicted_tokens, want_dx, want_dw, want_db, dw_fp32, accum_dtype in (torch.bfloat16, torch.float16))

    if reduction != "none":
        loss, z, hit = _ops.cross_entropy_totals(loss, z, hit, stats, loss, return_z_loss, return_token_accuracy)
    if enlarge:
        loss, z = loss / valid, z / valid if return_z_loss else z
        dx, dw, db = dx.float() / valid, dw / valid, db / valid
    else:
        dx, dw = dx.to(_input.dtype), dw.to(weight.dtype)
        db = db if bias is None else db.to(bias.dtype)
    return (loss, z if return_z_loss else None, hit if return_token_accuracy else None, prediction if return_predicted_tokens else None,
            dx.view(_input.shape) if want_dx else None, dw if want_dw else None, db if want_db else None)


def fused_linear_cross_entropy_backward(grad_output, grad_input, grad_weight, grad_bias):
    """The three gradients of :func:`fused_linear_cross_entropy_forward` times the scalar `grad_output`, which stays on the device.

    Inside a backward pass whose graph is not kept they are overwritten (a factor of 1 touches nothing); otherwise they are copied.
    """
    factor = grad_output.detach().reshape(()).float()
    copy = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()

    def scaled(grad):
        if grad is None:
            return None
        rows = grad.view(1, -1) if grad.dim() == 1 else as_rows(grad)
        if copy:
            return _ops.cross_entropy_scale(rows, factor).view(grad.shape)
        _ops.cross_entropy_scale_(rows, factor)
        torch.autograd.graph.increment_version(grad)
        return grad

    return scaled(grad_input), scaled(grad_weight), scaled(grad_bias)


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    """`apply(_input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False,
    return_predicted_tokens=False, ce_impl=None, ce_mode=None, chunk_mem_const=1)` -> (loss, z_loss, token_accuracy,
    predicted_tokens); see :func:`liger_fused_linear_cross_entropy`.

    For "mean" and "sum" the gradients are made in forward and nothing else is kept: backward does not read the weight. For "none"
    the inputs are kept and the logits are made again.
    """

    supports_inner_impl_dispatch = True

    @classmethod
    def apply(cls, _input, weight, target, *options):
        if not torch.is_grad_enabled():  # forward cannot see this; without it gradients would be made for nobody
            _input, weight = _input.detach(), weight.detach()
            options = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in options)
        # out here, a DTensor gets a DTensor gradient
        return super().apply(*(gather_dtensor(t) for t in (_input, weight, target, *options[:2])), *options[2:])

    @staticmethod
    def forward(ctx, _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
                reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
                return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, ce_mode=None, chunk_mem_const=1,
                logit_scale=1.0, stats=None, count=None, logits_memory=0):
        ctx.options = {
            "ignore_index": ignore_index, "lse_square_scale": lse_square_scale, "label_smoothing": label_smoothing, "reduction": reduction,
            "softcap": softcap, "accum_dtype": accum_dtype, "use_token_scaling": use_token_scaling, "ce_impl": ce_impl, "ce_mode": ce_mode,
            "chunk_mem_const": chunk_mem_const, "logit_scale": logit_scale, "logits_memory": logits_memory,
            "compute_dtype": product_dtype(_OP, _input, weight),
        }
        wanted = ctx.needs_input_grad
        if stats is None:
            class_weight = check_class_weight(_OP, ce_weight, weight.shape[0])
            asked = labels.ask(labels.indices(_OP, target.reshape(-1)), weight.shape[0], ignore_index, class_weight)
            stats, count = asked.device, asked.count()
        loss, z, hit, prediction, *grads = fused_linear_cross_entropy_forward(
            _input, weight, target, ce_weight, bias, return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens, compute_gradients=wanted[0], weight_requires_grad=wanted[1],
            bias_requires_grad=bias is not None and wanted[3], stats=stats, count=count, **ctx.options)
        ctx.dtypes = (_input.dtype, weight.dtype, None if bias is None else bias.dtype)
        if reduction == "none":
            ctx.count = count
            ctx.save_for_backward(_input, weight, target, bias, ce_weight, stats)
        else:
            trained = () if torch.compiler.is_compiling() else [t for t in (_input, weight, bias) if t is not None and t.requires_grad]
            ctx.save_for_backward(*grads, *map(descendant, trained))
        without_gradient(ctx, z, hit, prediction)
        return loss, z, hit, prediction

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, grad_output, *_):
        wanted = ctx.needs_input_grad
        if ctx.options["reduction"] == "none":
            _input, weight, target, bias, ce_weight, stats = ctx.saved_tensors
            grads = fused_linear_cross_entropy_forward(
                _input, weight, target, ce_weight, bias, token_grad_output=grad_output, compute_gradients=wanted[0],
                weight_requires_grad=wanted[1], bias_requires_grad=bias is not None and wanted[3], stats=stats, count=ctx.count,
                **ctx.options)[4:]
        else:
            grads = fused_linear_cross_entropy_backward(grad_output, *ctx.saved_tensors[:3])
        dx, dw, db = (None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True))
        return (dx, dw, None, db) + (None,) * (len(wanted) - 4)


def fused_linear_cross_entropy(
    x, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
    softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False,
    return_predicted_tokens=False, chunk_mem_const=1, *, logit_scale=1.0, label_stats=None, logits_memory=0,
):
    """:func:`liger_fused_linear_cross_entropy` with what the patched models need besides.

    Args:
        logit_scale: multiplies x weight^T + bias, before the soft cap.
        label_stats: what `labels.ask(target.reshape(-1), V, ignore_index, ce_weight)` returned. Asked for before the model runs,
            its count is there when the loss begins, and nothing waits for the device.
        logits_memory: most bytes of logits held at once (not below 640 rows on CUDA, 128 on the CPU); 0 for the default.

    Returns:
        (loss, z_loss, token_accuracy, predicted_tokens); what was not asked for is None.
    """
    stats, count = (None, None) if label_stats is None else (label_stats.device, label_stats.count())
    return LigerFusedLinearCrossEntropyFunction.apply(
        x, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype,
        use_token_scaling, return_token_accuracy, return_predicted_tokens, None, None, chunk_mem_const, logit_scale, stats, count,
        logits_memory)


def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
    softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False,
    return_predicted_tokens=False, chunk_mem_const=1,
):
    """Cross entropy between input weight^T + bias and class indices, without the (BT, V) logits.

    Args:
        input: (BT, H), fp32, bf16 or fp16, any strides.
        weight: (V, H). Under autocast both are used in its dtype, otherwise in the wider of the two.
        target: (BT,) class indices, int64 (narrower integers are widened); rows of `ignore_index` count for nothing, and are not worked on.
        bias: (V,) or None.
        ce_weight: (V,) class weights or None.
        lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, return_token_accuracy, return_predicted_tokens: as of
            :func:`liger_kernel.ops.cross_entropy.liger_cross_entropy`.
        accum_dtype: None or torch.float32 sum the weight's gradient in fp32. torch.bfloat16 and torch.float16 sum it in the weight's
            dtype on CUDA: half the memory, one rounding per chunk of 4096 rows.
        use_token_scaling: multiply each row's loss and gradient by the probability of its target, taken as a constant.
        chunk_mem_const: above 1, chunks may grow to about chunk_mem_const * BT * H logits: fewer, larger products.

    Returns:
        The loss in fp32, scalar or (BT,), or a :class:`CrossEntropyOutput` when another result is asked for. No row left: loss,
        accuracy and gradients are 0. Gradients have the dtypes of their tensors; one is made only where its tensor requires it.

    Raises:
        AssertionError: a target out of range (not under torch.compile or graph capture, where its loss is NaN); shapes or dtypes
            that do not fit; a flag that is not bool; an unknown reduction; label_smoothing outside [0, 1]; a softcap that is not
            positive.
        ValueError: chunk_mem_const is not an integer of at least 1; another accum_dtype.
        RuntimeError: targets that are not integers.
    """
    loss, z, hit, prediction = fused_linear_cross_entropy(
        input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens, chunk_mem_const)
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return loss
    return CrossEntropyOutput(loss=loss, z_loss=z, token_accuracy=hit, predicted_tokens=prediction)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """:func:`liger_fused_linear_cross_entropy` as a module whose `forward` takes the weight first."""

    def __init__(self, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean", softcap=None,
                 return_z_loss=False, accum_dtype=None, use_token_scaling=False, return_token_accuracy=False,
                 return_predicted_tokens=False):
        super().__init__()
        check_loss_options(_OP, label_smoothing, reduction, softcap)
        self.ce_weight, self.ignore_index, self.lse_square_scale, self.label_smoothing = (
            ce_weight, ignore_index, lse_square_scale, label_smoothing)
        self.reduction, self.softcap, self.return_z_loss, self.accum_dtype, self.use_token_scaling = (
            reduction, softcap, return_z_loss, accum_dtype, use_token_scaling)
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, lin_weight, _input, target, bias=None):
        """lin_weight (V, H), _input (BT, H), target (BT,), bias (V,) or None. ValueError when the first two are exchanged."""
        rows = target.numel()
        if lin_weight.shape[0] == rows and _input.shape[0] != rows:
            raise ValueError(
                f"LigerFusedLinearCrossEntropyLoss: arguments are (lin_weight, _input, target), the weight first; got lin_weight "
                f"{tuple(lin_weight.shape)}, _input {tuple(_input.shape)} and {rows} targets, which looks like the reverse")
        return liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, self.ce_weight, self.ignore_index, self.lse_square_scale, self.label_smoothing,
            self.reduction, self.softcap, self.return_z_loss, self.accum_dtype, self.use_token_scaling, self.return_token_accuracy,
            self.return_predicted_tokens)

    def extra_repr(self):
        return (f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
                f"softcap={self.softcap}")
