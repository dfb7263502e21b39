"""SiLU-gated unit: c = silu(a gate_multiplier) b down_multiplier (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import Layout
from liger_kernel.core.tensors import as_rows, in_leaf, rows_apart, rows_or_whole, shaped
from liger_kernel.utils import infer_device_arch

EXPORTS = ["LigerSiLUMulFunction", "LigerFusedGateUpSiLUMulFunction", "swiglu_forward", "swiglu_backward"]


@register_fake("liger_kernel::swiglu_forward")
def _(a, b, gate_multiplier, down_multiplier):
    return torch.empty_like(a, memory_format=torch.contiguous_format)


@register_fake("liger_kernel::swiglu_backward")
def _(dc, a, b, gate_multiplier, down_multiplier, want_da, want_db):
    return tuple(dc.new_empty(dc.shape if want else (0,)) for want in (want_da, want_db))


@register_fake("liger_kernel::swiglu_packed_forward")
def _(y, gate_multiplier, down_multiplier):
    return y.new_empty((*y.shape[:-1], y.shape[-1] // 2))


@register_fake("liger_kernel::swiglu_packed_backward")
def _(dc, y, gate_multiplier, down_multiplier):
    return torch.empty_like(y, memory_format=torch.contiguous_format)


@register_fake("liger_kernel::swiglu_packed_backward_")
def _(dc, y, gate_multiplier, down_multiplier):
    return None


def _should_tile(n_cols):
    """Whether a Blackwell GPU would split rows of `n_cols`. For callers of the reference package; no result depends on it."""
    return infer_device_arch().startswith("blackwell") and n_cols > 8192


def operands(op, a, b):
    """`a` and `b` [..., H] of one dtype, as eager PyTorch would promote them.

    Raises:
        RuntimeError: their shapes differ.
    """
    if a.shape != b.shape:
        raise RuntimeError(f"{op}: a has shape {tuple(a.shape)}, b {tuple(b.shape)}; they must be equal")
    if a.dtype != b.dtype:
        dtype = torch.promote_types(a.dtype, b.dtype)
        with torch.enable_grad():  # what is saved descends from its input: see core/autograd.py
            a, b = a.to(dtype), b.to(dtype)
    return a, b


def shard(ctx, a, b):
    """The plain tensors to work on, and `ctx.layout`: None unless `a` or `b` is a DTensor."""
    ctx.layout = layout = Layout.of(a, b)
    if layout is not None:
        ctx.plain = [not hasattr(t, "to_local") for t in (a, b)]
        a, b = local(layout, a), local(layout, b)
    ctx.dtypes = a.dtype, b.dtype
    return a, b


def local(layout, t):
    """This rank's shard of an operand; it descends from it for autograd (see core/autograd.py)."""
    with torch.enable_grad():
        return layout.local(t)


def local_gradient(ctx, dc, dtype):
    """Upstream gradient as rows of this rank's shard."""
    dc = dc if ctx.layout is None else ctx.layout.local(dc)
    return dc.shape, rows_or_whole(dc if dc.dtype == dtype else dc.to(dtype))


def gradients(ctx, shape, da, db):
    """Kernel outputs as gradients of the operands: their dtypes, shapes and placements; None where not wanted."""
    result = []
    for i, d in enumerate((da, db)):
        if not ctx.needs_input_grad[i]:
            d = None
        else:
            d = shaped(d, shape)
            d = d if d.dtype == ctx.dtypes[i] else d.to(ctx.dtypes[i])
        result.append(d if ctx.layout is None else ctx.layout.gradient(d, ctx.plain[i]))
    return result


class LigerSiLUMulFunction(torch.autograd.Function):
    """`apply(a, b, gate_multiplier=1.0, down_multiplier=1.0)`; see :func:`liger_swiglu`.

    Saves a and b and computes the activation again in backward, into memory of its own: a second backward is right. With a
    DTensor among a and b, the other one is brought to its mesh and placements, and the result has them too.
    """

    @staticmethod
    def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
        a, b = operands("swiglu", *shard(ctx, a, b))
        rows_a, rows_b = rows_or_whole(a), rows_or_whole(b)
        ctx.save_for_backward(rows_a, rows_b)
        ctx.multipliers = float(gate_multiplier), float(down_multiplier)
        c = shaped(_ops.swiglu_forward(rows_a, rows_b, *ctx.multipliers), a.shape)
        return c if ctx.layout is None else ctx.layout.wrap(c)

    @staticmethod
    @first_derivative_only("swiglu")
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        shape, dc = local_gradient(ctx, dc, a.dtype)
        da, db = _ops.swiglu_backward(dc, a, b, *ctx.multipliers, *ctx.needs_input_grad[:2])
        return *gradients(ctx, shape, da, db), None, None


class LigerFusedGateUpSiLUMulFunction(torch.autograd.Function):
    """`apply(y, in_place=False)`: silu(left half) times right half of y [..., 2 I], shape [..., I].

    Both halves are read where they are, and backward writes one gradient [..., 2 I]. With `in_place` that gradient lies over
    y, unless y is in the memory of a leaf that requires grad, rows of y share memory, or the call is being compiled.

    Raises:
        ValueError: the last dimension is odd.
        RuntimeError: a second backward through this node after `in_place`.
    """

    @staticmethod
    def forward(ctx, y, in_place=False):
        if y.shape[-1] % 2:
            raise ValueError(f"swiglu: y has {y.shape[-1]} columns, expected an even number: gate and up halves")
        in_place = in_place and not torch.compiler.is_compiling()
        overwrite = in_place and not in_leaf(y)
        ctx.layout = layout = Layout.of(y, whole=(y.ndim - 1,))
        if layout is not None:
            y = local(layout, y)
        rows, cols = rows_or_whole(y), y.shape[-1] // 2
        ctx.once, ctx.overwrite = in_place, overwrite and rows_apart(rows)
        ctx.save_for_backward(rows)
        c = shaped(_ops.swiglu_packed_forward(rows, 1.0, 1.0), (*y.shape[:-1], cols))
        return c if layout is None else layout.wrap(c, cols)

    @staticmethod
    @first_derivative_only("swiglu")
    def backward(ctx, dc):
        if ctx.once is None:
            raise RuntimeError("swiglu: a second backward after in_place=True, whose first one may have overwritten y; use in_place=False")
        (y,) = ctx.saved_tensors
        shape, dc = local_gradient(ctx, dc, y.dtype)
        if ctx.overwrite:
            _ops.swiglu_packed_backward_(dc, y, 1.0, 1.0)
            torch.autograd.graph.increment_version(y)  # tells whoever else saved it
            dy = y.detach()
        else:
            dy = _ops.swiglu_packed_backward(dc, y, 1.0, 1.0)
        if ctx.once:
            ctx.once = None
        dy = shaped(dy, (*shape[:-1], y.shape[-1]))
        return dy if ctx.layout is None else ctx.layout.wrap(dy), None


def liger_swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    """SiLU-gated unit, c = silu(a gate_multiplier) b down_multiplier.

    Args:
        a: [..., H] gate, fp32, bf16 or fp16, any strides.
        b: [..., H] what is gated. Another dtype than a's is promoted as in eager PyTorch.
        gate_multiplier: factor on a, applied in fp32.
        down_multiplier: factor on the result.

    Returns:
        [..., H] in that dtype. fp32 inside; silu is rounded to the dtype before the product, as eager code does.

    Raises:
        RuntimeError: the shapes differ. RuntimeError (ValueError before torch 2.12): other devices or dtypes.
    """
    return LigerSiLUMulFunction.apply(a, b, gate_multiplier, down_multiplier)


def swiglu_forward(a, b, gate_multiplier=1.0):
    """(a as rows, b as rows, c) without autograd."""
    a, b = operands("swiglu", a, b)
    rows_a, rows_b = as_rows(a), as_rows(b)
    return rows_a, rows_b, _ops.swiglu_forward(rows_a, rows_b, float(gate_multiplier), 1.0).view(a.shape)


def swiglu_backward(a, b, dc, gate_multiplier=1.0):
    """(da, db), shaped like dc, from what :func:`swiglu_forward` returned."""
    da, db = _ops.swiglu_backward(as_rows(dc), as_rows(a), as_rows(b), float(gate_multiplier), 1.0, True, True)
    return da.view(dc.shape), db.view(dc.shape)


def swiglu_fused_gate_up_forward(y):
    """(y, c) without autograd: c [..., I] from y [..., 2 I]. ValueError for an odd last dimension."""
    if y.shape[-1] % 2:
        raise ValueError(f"swiglu: y has {y.shape[-1]} columns, expected an even number: gate and up halves")
    return y, _ops.swiglu_packed_forward(as_rows(y), 1.0, 1.0).view(*y.shape[:-1], y.shape[-1] // 2)


def swiglu_fused_gate_up_backward(y, dc, in_place=False):
    """dy like y, from c's gradient. With `in_place` it is written over y, unless y is in the memory of a leaf that requires grad,
    rows of y share memory, or y cannot be viewed as rows."""
    rows = as_rows(y)
    if in_place and rows_apart(rows) and not in_leaf(y):
        _ops.swiglu_packed_backward_(as_rows(dc), rows, 1.0, 1.0)
        return rows.view(y.shape)
    return _ops.swiglu_packed_backward(as_rows(dc), rows, 1.0, 1.0).view(y.shape)
