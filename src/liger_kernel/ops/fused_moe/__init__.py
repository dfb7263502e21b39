"""Mixture of gated experts: out_t = sum over k of w_tk down_e(silu(gate_e x_t) up_e x_t), e = index_tk (Shazeer et al., "Outrageously
Large Neural Networks", 2017; SwiGLU: Shazeer, 2020)."""

import torch
import torch.nn.functional as F

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import gather_dtensor, has_values, unit_stride
from liger_kernel.ops import swiglu as _swiglu  # registers what swiglu_packed_forward returns

EXPORTS = ["LigerFusedMoEFunction"]

_INDEX_DTYPES = (torch.int32, torch.int64)


@register_fake("liger_kernel::fused_moe_route")
def _(index, experts):
    slots = index.numel()
    return tuple(index.new_empty(shape, dtype=torch.int32) for shape in ((experts + 1,), (slots,), (slots,), index.shape))


@register_fake("liger_kernel::fused_moe_combine")
def _(y, place, starts, weight):
    return y.new_empty((place.shape[0], y.shape[1]))


@register_fake("liger_kernel::fused_moe_gate_gradient")
def _(da, h, order, starts, weight, want_dh, want_weighted, want_dweight):
    slots, cols = h.shape[0], h.shape[1] // 2
    return (h.new_empty(h.shape if want_dh else (0,)), h.new_empty((slots if want_weighted else 0, cols)),
            weight.new_empty(weight.shape if want_dweight else (0,)))


@register_fake("liger_kernel::fused_moe_project")
def _(x, w, starts, transpose):
    return x.new_empty((x.shape[0], w.shape[1 if transpose else 2]))


@register_fake("liger_kernel::fused_moe_weight_gradient")
def _(a, b, starts):
    return a.new_empty((starts.shape[0] - 1, a.shape[1], b.shape[1]))


# --- products of each expert's rows -------------------------------------------------------------------------------------------


def _in_one_launch(columns, *matrices):
    """Whether torch's grouped product takes these: bf16 on CUDA, whole 16-byte vectors, in the result's `columns` as well. It reads the
    experts' row counts on the device; ours goes expert by expert, which on CUDA waits for them."""
    if not hasattr(F, "grouped_mm") or columns % 8:
        return False
    return all(
        t.is_cuda and t.dtype == torch.bfloat16 and t.numel() > 0 and t.shape[-1] % 8 == 0 and all(s % 8 == 0 for s in t.stride()[:-1])
        and (torch.compiler.is_compiling() or not has_values(t) or t.data_ptr() % 16 == 0)
        for t in matrices
    )


def _project(x, w, starts, transpose):
    """x [slots, k] times each slot's expert's w [E, n, k] transposed, or w [E, k, n]: [slots, n]."""
    if _in_one_launch(w.shape[1 if transpose else 2], x, w):
        return F.grouped_mm(x, w.mT if transpose else w, offs=starts[1:])
    return _ops.fused_moe_project(x, w, starts, transpose)


def _weight_gradient(a, b, starts):
    """The sum of a[slot] b[slot]^T over each expert's slots: [E, m, n] from [slots, m] and [slots, n]."""
    if _in_one_launch(b.shape[1], a, b):
        return F.grouped_mm(a.mT, b, offs=starts[1:])
    return _ops.fused_moe_weight_gradient(a, b, starts)


# --- the op -------------------------------------------------------------------------------------------------------------------


def _check(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
    if x.dim() != 2 or gate_up_proj.dim() != 3 or down_proj.dim() != 3 or top_k_index.dim() != 2:
        raise ValueError(
            f"fused_moe: x, gate_up_proj, down_proj and top_k_index have {x.dim()}, {gate_up_proj.dim()}, {down_proj.dim()} and "
            f"{top_k_index.dim()} dimensions, expected (T, H), (E, 2I, H), (E, H, I) and (T, K); flatten the tokens")
    (experts, double, hidden), inner = gate_up_proj.shape, down_proj.shape[2]
    if x.shape[1] != hidden or down_proj.shape != (experts, hidden, inner) or double != 2 * inner:
        raise ValueError(
            f"fused_moe: x is {tuple(x.shape)}, gate_up_proj {tuple(gate_up_proj.shape)}, down_proj {tuple(down_proj.shape)}; "
            "expected (T, H), (E, 2I, H), (E, H, I)")
    if top_k_index.shape[0] != x.shape[0] or top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"fused_moe: x has {x.shape[0]} rows, top_k_index is {tuple(top_k_index.shape)}, top_k_weights {tuple(top_k_weights.shape)}; "
            "expected T and twice (T, K)")
    if top_k_index.dtype not in _INDEX_DTYPES:
        raise TypeError(f"fused_moe: top_k_index is {top_k_index.dtype}, expected int32 or int64")
    if gate_up_proj.dtype != down_proj.dtype:
        raise TypeError(f"fused_moe: gate_up_proj is {gate_up_proj.dtype}, down_proj {down_proj.dtype}; cast one of them")


def _as(t, dtype):
    """`t` without gaps in its last dimension, in `dtype`; itself where it is that already: see docs/decisions.md."""
    return unit_stride(t if t.dtype == dtype else t.to(dtype))


def _whole(t):
    return t if t.is_contiguous() else t.contiguous()


class LigerFusedMoEFunction(torch.autograd.Function):
    """`apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights)`; see :func:`liger_fused_moe`.

    Saves the inputs, the (T K, 2I) products of gate and up, and how choices are sorted; activations and the experts' outputs are not
    kept. Gradients are computed for what requires one.
    """

    @classmethod
    def apply(cls, *tensors):
        return super().apply(*map(gather_dtensor, tensors))  # out here, a DTensor gets a DTensor gradient

    @staticmethod
    def forward(ctx, x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        _check(x, gate_up_proj, down_proj, top_k_index, top_k_weights)
        ctx.set_materialize_grads(False)
        ctx.dtypes = x.dtype, gate_up_proj.dtype, down_proj.dtype, top_k_weights.dtype
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else gate_up_proj.dtype
        with torch.enable_grad():  # what is saved descends from its input: see core/autograd.py
            rows, gate_up_proj, down_proj = _as(x, dtype), _as(gate_up_proj, dtype), _as(down_proj, dtype)
            weights = _whole(_as(top_k_weights, torch.float32))
        starts, token, order, place = _ops.fused_moe_route(_whole(top_k_index), gate_up_proj.shape[0])
        h = _project(rows.index_select(0, token), gate_up_proj, starts, True)
        y = _project(_ops.swiglu_packed_forward(h, 1.0, 1.0), down_proj, starts, True)
        ctx.save_for_backward(rows, gate_up_proj, down_proj, weights, h, starts, token, order, place)
        return _as(_ops.fused_moe_combine(y, place, starts, weights), x.dtype)

    @staticmethod
    @first_derivative_only("fused_moe")
    def backward(ctx, dout):
        if dout is None:
            return None, None, None, None, None
        rows, gate_up_proj, down_proj, weights, h, starts, token, order, place = ctx.saved_tensors
        want_x, want_gate_up, want_down, _, want_weights = ctx.needs_input_grad
        want_dh = want_x or want_gate_up
        dy = _as(dout, rows.dtype).index_select(0, token)
        da = _project(dy, down_proj, starts, False) if want_dh or want_weights else None
        dh, weighted, d_weights = _ops.fused_moe_gate_gradient(da, h, order, starts, weights, want_dh, want_down, want_weights)
        del da
        d_down = _weight_gradient(dy, weighted, starts) if want_down else None
        del dy, weighted
        d_gate_up = _weight_gradient(dh, rows.index_select(0, token), starts) if want_gate_up else None
        dx = _ops.fused_moe_combine(_project(dh, gate_up_proj, starts, False), place, starts, None) if want_x else None
        gradients = dx, d_gate_up, d_down, d_weights if want_weights else None
        dx, d_gate_up, d_down, d_weights = (g if g is None else _as(g, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))
        return dx, d_gate_up, d_down, None, d_weights


def liger_fused_moe(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
    """Each token through its experts' gated MLPs, weighted and added up.

    Args:
        x: (T, H), fp32, bf16 or fp16, any strides.
        gate_up_proj: (E, 2I, H), the rows of the gate first. x is cast to its dtype; under autocast, all three to autocast's.
        down_proj: (E, H, I), of the same dtype.
        top_k_index: (T, K) int32 or int64. Outside [0, E): no expert, which contributes nothing and takes no gradient.
        top_k_weights: (T, K), any floating dtype; used in fp32.

    Returns:
        (T, H) in x's dtype. Experts' outputs are rounded to the projections' dtype, weighted and added in fp32, rounded once.

        Gradients of x, the projections (zero for experts without tokens) and the weights, each in its own dtype. Results repeat bit
        for bit. DTensors are taken whole.

    Raises:
        ValueError: shapes that do not fit. TypeError: an index that is neither int32 nor int64, projections of different dtypes.
        RuntimeError (ValueError before torch 2.12): tensors on different devices, or of another dtype.
    """
    return LigerFusedMoEFunction.apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


def compute_routing_metadata(topk_indices, E, block_m_token=64):
    """How the choices of `topk_indices` (T, K) are sorted by expert, stable in the order of tokens.

    Args:
        topk_indices: (T, K) int32 or int64; outside [0, E) counts as no expert, which comes last.
        E: number of experts.
        block_m_token: rows of a tile.

    Returns:
        Seven int32 tensors: expert_token_count (E,); expert_start_idx (E + 1,), exclusive prefix sums; x_gather_idx (T K,), the token
        of each sorted slot; s_scatter_idx (T K,), the choice t K + k of each; s_reverse_scatter_idx (T K,), its inverse;
        tile_row_start and tile_expert, one entry for each tile of at most `block_m_token` slots of one expert. The number of tiles is
        read from the device.
    """
    starts, token, order, place = _ops.fused_moe_route(topk_indices.contiguous(), E)
    count = starts.diff()
    tiles = (count + block_m_token - 1) // block_m_token
    total = int(tiles.sum())
    expert = torch.repeat_interleave(torch.arange(E, device=tiles.device, dtype=torch.int32), tiles, output_size=total)
    first = (tiles.cumsum(0) - tiles)[expert]  # tile of each tile's expert
    row = starts[expert] + (torch.arange(total, device=tiles.device) - first) * block_m_token
    return count, starts, token, order, place.flatten(), row.to(torch.int32), expert
