"""SiLU-gated unit: c = silu(a gate_multiplier) b down_multiplier (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.sharded import Layout
from liger_kernel.core.tensors import as_rows
from liger_kernel.utils import infer_device_arch

EXPORTS = ["LigerSiLUMulFunction", "LigerFusedGateUpSiLUMulFunction", "swiglu_forward", "swiglu_backward"]


@torch.library.register_fake("liger_kernel::swiglu_forward")
def _(a, b, gate_multiplier, down_multiplier):
    return torch.empty_like(a, memory_format=torch.contiguous_format)


@torch.library.register_fake("liger_kernel::swiglu_backward")
def _(dc, a, b, gate_multiplier, down_multiplier, want_da, want_db):
    return tuple(a.new_empty((a.shape[0] if want else 0, a.shape[1])) for want in (want_da, want_db))


@torch.library.register_fake("liger_kernel::swiglu_packed_forward")
def _(y, gate_multiplier, down_multiplier):
    return y.new_empty((y.shape[0], y.shape[1] // 2))


@torch.library.register_fake("liger_kernel::swiglu_packed_backward")
def _(dc, y, gate_multiplier, down_multiplier):
    return torch.empty_like(y, memory_format=torch.contiguous_format)


@torch.library.register_fake("liger_kernel::swiglu_packed_backward_")
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
        a, b = a.to(dtype), b.to(dtype)
    return a, b


def shard(ctx, a, b):
    """The plain tensors to work on, and `ctx.layout`: None unless `a` or `b` is a DTensor."""
    ctx.layout = layout = Layout.of(a, b)
    if layout is not None:
        ctx.plain = [not hasattr(t, "to_local") for t in (a, b)]
        a, b = layout.local(a), layout.local(b)
    ctx.dtypes = a.dtype, b.dtype
    return a, b


def local_gradient(ctx, dc, dtype):
    """Upstream gradient as rows of this rank's shard."""
    dc = dc if ctx.layout is None else ctx.layout.local(dc)
    return dc.shape, as_rows(dc.to(dtype))


def gradients(ctx, shape, da, db):
    """Kernel outputs as gradients of the operands: their dtypes, shapes and placements; None where not wanted."""
    result = []
    for i, d in enumerate((da, db)):
        d = d.view(shape).to(ctx.dtypes[i]) if ctx.needs_input_grad[i] else None
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
        rows_a, rows_b = as_rows(a), as_rows(b)
        ctx.save_for_backward(rows_a, rows_b)
        ctx.multipliers = float(gate_multiplier), float(down_multiplier)
        c = _ops.swiglu_forward(rows_a, rows_b, *ctx.multipliers).view(a.shape)
        return c if ctx.layout is None else ctx.layout.wrap(c)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        shape, dc = local_gradient(ctx, dc, a.dtype)
        da, db = _ops.swiglu_backward(dc, a, b, *ctx.multipliers, *ctx.needs_input_grad[:2])
        return *gradients(ctx, shape, da, db), None, None


class LigerFusedGateUpSiLUMulFunction(torch.autograd.Function):
    """`apply(y, in_place=False)`: silu(left half) times right half of y [..., 2 I], shape [..., I].

    Both halves are read where they are, and backward writes one gradient [..., 2 I]. With `in_place` that gradient lies over
    y (unless y is a leaf, whose .grad would then be y): a second backward through this node raises RuntimeError.

    Raises:
        ValueError: the last dimension is odd.
    """

    @staticmethod
    def forward(ctx, y, in_place=False):
        if y.shape[-1] % 2:
            raise ValueError(f"swiglu: y has {y.shape[-1]} columns, expected an even number: gate and up halves")
        ctx.in_place, ctx.overwrite = bool(in_place), bool(in_place) and not y.is_leaf
        ctx.layout = layout = Layout.of(y, whole_rows=True)
        if layout is not None:
            y = layout.local(y)
        rows, cols = as_rows(y), y.shape[-1] // 2
        ctx.save_for_backward(rows)
        c = _ops.swiglu_packed_forward(rows, 1.0, 1.0).view(*y.shape[:-1], cols)
        return c if layout is None else layout.wrap(c, cols)

    @staticmethod
    def backward(ctx, dc):
        (y,) = ctx.saved_tensors
        shape, dc = local_gradient(ctx, dc, y.dtype)
        if ctx.overwrite:
            _ops.swiglu_packed_backward_(dc, y, 1.0, 1.0)
            dy = y.detach()
        else:
            dy = _ops.swiglu_packed_backward(dc, y, 1.0, 1.0)
        if ctx.in_place:
            torch.autograd.graph.increment_version(y)  # makes saved_tensors raise next time
        dy = dy.view(*shape[:-1], y.shape[1])
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
    """dy like y, from c's gradient; written over y when `in_place` (and y's rows can be viewed as they are)."""
    rows = as_rows(y)
    if in_place:
        _ops.swiglu_packed_backward_(as_rows(dc), rows, 1.0, 1.0)
        return rows.view(y.shape)
    return _ops.swiglu_packed_backward(as_rows(dc), rows, 1.0, 1.0).view(y.shape)
