"""A SwiGLU feed-forward layer as one autograd node: y = (silu(g x Wg^T) (x Wu^T)) Wd^T d."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.tensors import as_rows, product_dtype

EXPORTS = ["LigerMLPFunction"]

_OP = "mlp"


def _check(x, gate_weight, up_weight, down_weight):
    """The dtype to compute in. TypeError, ValueError as of :func:`liger_mlp`."""
    given = (x, gate_weight, up_weight, down_weight)
    if any(hasattr(t, "to_local") for t in given):
        raise TypeError(f"{_OP}: takes plain tensors, got a DTensor; LigerSwiGLUMLP calls its linears, which know how to work on shards")
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if not autocast and len({t.dtype for t in given}) > 1:
        dtypes = ", ".join(str(t.dtype).removeprefix("torch.") for t in given)
        raise TypeError(f"{_OP}: input, gate, up and down weights have dtypes {dtypes}; they must be equal, or autocast be on")
    try:
        dtype = product_dtype(_OP, *given)
    except RuntimeError as e:
        raise TypeError(str(e)) from None
    if x.dim() < 1 or any(w.dim() != 2 for w in given[1:]):
        raise ValueError(f"{_OP}: weights have {', '.join(str(w.dim()) for w in given[1:])} dimensions, expected two; input at least one")
    inner, hidden = gate_weight.shape
    if x.shape[-1] != hidden or up_weight.shape != gate_weight.shape or down_weight.shape[1] != inner:
        raise ValueError(f"{_OP}: input (..., {x.shape[-1]}), gate_weight {tuple(gate_weight.shape)}, up_weight {tuple(up_weight.shape)}, "
                         f"down_weight {tuple(down_weight.shape)} do not fit; expected (..., H), (I, H), (I, H), (O, I)")
    return dtype


class LigerMLPFunction(torch.autograd.Function):
    """`apply(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0)`; see :func:`liger_mlp`.

    Saves input, weights, gate and up: the product of the two is computed again in backward, so that it is not kept.
    """

    @staticmethod
    def forward(ctx, input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
        dtype = _check(input, gate_weight, up_weight, down_weight)
        ctx.shape, ctx.dtypes = input.shape, [t.dtype for t in (input, gate_weight, up_weight, down_weight)]
        ctx.multipliers = float(gate_multiplier), float(down_multiplier)
        with torch.enable_grad():  # what is saved descends from its input: see core/autograd.py
            x, wg, wu, wd = as_rows(input.to(dtype)), *(w.to(dtype) for w in (gate_weight, up_weight, down_weight))
        gate, up = torch.mm(x, wg.t()), torch.mm(x, wu.t())
        y = torch.mm(_ops.swiglu_forward(gate, up, *ctx.multipliers), wd.t())
        ctx.save_for_backward(x, wg, wu, wd, gate, up)
        return y.view(*input.shape[:-1], wd.shape[0])

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, dy):
        x, wg, wu, wd, gate, up = ctx.saved_tensors
        want_x, want_gate, want_up, want_down = ctx.needs_input_grad[:4]
        dy = as_rows(dy.to(x.dtype))
        dx = dwg = dwu = dwd = None
        if want_down:
            dwd = torch.mm(dy.t(), _ops.swiglu_forward(gate, up, *ctx.multipliers))
        if want_x or want_gate or want_up:
            dgate, dup = _ops.swiglu_backward(torch.mm(dy, wd), gate, up, *ctx.multipliers, want_x or want_gate, want_x or want_up)
            if want_gate:
                dwg = torch.mm(dgate.t(), x)
            if want_up:
                dwu = torch.mm(dup.t(), x)
            if want_x:
                dx = torch.addmm(torch.mm(dgate, wg), dup, wu).view(ctx.shape)
        return *(g if g is None else g.to(dtype) for g, dtype in zip((dx, dwg, dwu, dwd), ctx.dtypes, strict=True)), None, None


def liger_mlp(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
    """SwiGLU feed-forward layer, y = (silu(gate_multiplier input gate_weight^T) (input up_weight^T)) down_weight^T down_multiplier.

    Args:
        input: (..., H), fp32, bf16 or fp16, any strides.
        gate_weight, up_weight: (I, H), as nn.Linear keeps them.
        down_weight: (O, I); O is H in a model.
        gate_multiplier: factor on the gate, applied in fp32.
        down_multiplier: factor on the product of the two, applied in fp32.

    Returns:
        (..., O). Products accumulate in fp32 and are rounded to the dtype; silu is rounded before it meets up, as eager code does.

    Raises:
        TypeError: dtypes that differ without autocast, or are none of the three; a DTensor.
        ValueError: shapes that do not fit.
    """
    return LigerMLPFunction.apply(input, gate_weight, up_weight, down_weight, gate_multiplier, down_multiplier)
