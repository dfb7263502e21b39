"""Rotary position embedding (Su et al., 2021) of q and k: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin for every channel pair.

The functions here are named by where a pair's channels lie in a head and in a table row; see :func:`rope`."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.backends import registry, third_party
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import Layout
from liger_kernel.core.tensors import gather_dtensor, unit_stride

EXPORTS = ["LigerRopeFunction", "rope_forward", "rope_backward"]

HALVES, PAIRS, SHARED, COMPLEX = 0, 1, 2, 3  # rope.h: Order
# channels -> (order of the input's pairs, of the output's pairs)
CHANNELS = {"halves": (HALVES, HALVES), "pairs": (PAIRS, PAIRS), "pairs_to_halves": (PAIRS, HALVES)}
TABLES = {"halves": HALVES, "pairs": PAIRS, "shared": SHARED, "complex": COMPLEX}


@register_fake("liger_kernel::rope")
def _(q, k, cos, sin, heads_dim, rotary_dim, input, output, table, inverse, q_tokens_outer, k_tokens_outer):
    return _empty_heads(q, heads_dim, q_tokens_outer), _empty_heads(k, heads_dim, k_tokens_outer)


def _empty_heads(t, heads_dim, tokens_outer):
    inner = heads_dim if tokens_outer else 3 - heads_dim
    strides = [0, 0, 0, 1]
    strides[inner] = t.shape[3]
    strides[3 - inner] = t.shape[3] * t.shape[inner]
    strides[0] = strides[3 - inner] * t.shape[3 - inner]
    return t.new_empty_strided(t.shape, strides)


def _heads_dim(unsqueeze_dim):
    if unsqueeze_dim not in (1, 2, -3, -2):
        raise ValueError(f"rope: unsqueeze_dim is {unsqueeze_dim}, expected 1 for q (batch, heads, tokens, head_dim) or 2 for "
                         "(batch, tokens, heads, head_dim)")
    return unsqueeze_dim % 4


def _table_rows(name, t, batch, tokens, heads_dim):
    """`t` as (1 or batch, tokens, width); a view where it has another shape."""
    shape = t.shape
    if len(shape) == 3:
        pass
    elif len(shape) == 4:
        t = t.squeeze(heads_dim) if shape[heads_dim] == 1 else t.squeeze(1)
    elif len(shape) == 2:
        t = t.unsqueeze(0)
    rows = t.shape
    if len(rows) != 3 or rows[0] not in (1, batch) or rows[1] not in (1, tokens):
        raise ValueError(f"rope: {name} has the shape {tuple(shape)}, expected (tokens, width), (1 or batch, tokens, width) or one more "
                         f"dimension of size 1 for the heads, with batch {batch} and tokens {tokens}")
    return t if rows[1] == tokens else t.expand(rows[0], tokens, rows[2])


def _arguments(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, channels, table):
    """cos and sin as the op takes them, and its options (heads_dim, rotary_dim, input, output, table)."""
    if isinstance(position_ids, int):  # (q, k, cos, sin, unsqueeze_dim): newer hosts have no position_ids
        unsqueeze_dim = position_ids
    heads_dim = _heads_dim(unsqueeze_dim)
    if channels not in CHANNELS:
        raise ValueError(f"rope: channels is {channels!r}, expected one of {', '.join(CHANNELS)}")
    if table is not None and table not in TABLES:
        raise ValueError(f"rope: table is {table!r}, expected None or one of {', '.join(TABLES)}")
    q_shape, k_shape = q.shape, k.shape
    for name, shape in (("q", q_shape), ("k", k_shape)):
        if len(shape) != 4:
            raise ValueError(f"rope: {name} has the shape {tuple(shape)}, expected 4 dimensions")
    batch, tokens, head_dim = q_shape[0], q_shape[3 - heads_dim], q_shape[3]
    if batch != k_shape[0] or tokens != k_shape[3 - heads_dim] or head_dim != k_shape[3]:
        raise ValueError(f"rope: q {tuple(q_shape)} and k {tuple(k_shape)} may differ in dimension {heads_dim} (heads) only")
    cos, sin = _table_rows("cos", cos, batch, tokens, heads_dim), _table_rows("sin", sin, batch, tokens, heads_dim)
    width, sin_width = cos.shape[2], sin.shape[2]
    if sin_width != width:
        raise ValueError(f"rope: cos has {width} columns, sin has {sin_width}")

    r = min(width, head_dim) if rotary_dim is None else rotary_dim
    if r <= 0 or r % 2 or r > head_dim:
        raise ValueError(f"rope: rotary_dim is {r}, expected an even number in (0, {head_dim}]; unless given it is the smaller of cos's "
                         "width and head_dim")
    if table is None:
        table = ("halves" if channels != "pairs" else "pairs") if width == r else "shared"
    columns = r // 2 if table == "shared" else r
    if width < columns:
        raise ValueError(f"rope: cos has {width} columns, rotary_dim {r} takes {columns}")
    if width > columns:
        cos, sin = cos[..., :columns], sin[..., :columns]
    return unit_stride(cos), unit_stride(sin), (heads_dim, r, *CHANNELS[channels], TABLES[table])


def _layout(t, heads_dim):
    """(`t` with contiguous channels, whether tokens lie outside heads in memory): the latter decides the layout of the result and of
    the gradient."""
    strides = t.stride()
    return t if strides[3] == 1 else unit_stride(t), strides[3 - heads_dim] >= strides[heads_dim]


def _rotate(q, k, cos, sin, options):
    """(q', k', the layouts of both)"""
    (q, q_outer), (k, k_outer) = _layout(q, options[0]), _layout(k, options[0])
    return *_ops.rope(q, k, cos, sin, *options, False, q_outer, k_outer), (q_outer, k_outer)


def _rotate_back(dq, dk, cos, sin, options, layouts):
    heads_dim, rotary_dim, input, output, table = options
    return _ops.rope(unit_stride(dq), unit_stride(dk), cos, sin, heads_dim, rotary_dim, output, input, table, True, *layouts)


def _on_shards(rotate, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, *options):
    """`rotate` of DTensors: every rank turns the heads that it holds, all tokens and channels of them, and the results lie likewise."""
    heads_dim = _heads_dim(position_ids if isinstance(position_ids, int) else unsqueeze_dim)
    layouts = [Layout.of(t, whole=(0, 3 - heads_dim, 3)) for t in (q, k)]
    q, k = (t if layout is None else layout.local(t) for t, layout in zip((q, k), layouts, strict=True))
    turned = rotate(q, k, gather_dtensor(cos), gather_dtensor(sin), None, heads_dim, *options)
    return tuple(t if layout is None else layout.wrap(t) for t, layout in zip(turned, layouts, strict=True))


def turn(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, channels="halves", table=None):
    """The forward of an autograd.Function that turns q and k; :func:`turn_back` is its backward."""
    cos, sin, options = _arguments(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, channels, table)
    ctx.save_for_backward(cos, sin)
    ctx.options = options
    q, k, ctx.layouts = _rotate(q, k, cos, sin, options)
    return q, k


def turn_back(ctx, dq, dk):
    """The gradients of q and k, each None where it is not wanted."""
    cos, sin = ctx.saved_tensors
    want_q, want_k = ctx.needs_input_grad[:2]
    if not want_q:  # a gradient that nobody wants is left out of the launch
        dq = dq.narrow(ctx.options[0], 0, 0)
    if not want_k:
        dk = dk.narrow(ctx.options[0], 0, 0)
    dq, dk = _rotate_back(dq, dk, cos, sin, ctx.options, ctx.layouts)
    return dq if want_q else None, dk if want_k else None


class LigerRopeFunction(torch.autograd.Function):
    """`apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, channels="halves", table=None)` -> (q', k'); see
    :func:`rope`. cos and sin get no gradient."""

    @classmethod
    def apply(cls, q, k, table, *rest):
        if hasattr(q, "to_local") or hasattr(k, "to_local") or hasattr(table, "to_local"):
            if cls is LigerRopeFunction:
                return _on_shards(super().apply, q, k, table, *rest)
            q, k, table, *rest = map(gather_dtensor, (q, k, table, *rest))  # a subclass has tables of its own
        return super().apply(q, k, table, *rest)

    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, channels="halves", table=None):
        return turn(ctx, q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, channels, table)

    @staticmethod
    @first_derivative_only("rope")  # in q and k it is zero; in the upstream gradient it is not made
    def backward(ctx, dq, dk):
        return *turn_back(ctx, dq, dk), None, None, None, None, None, None, None


def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None, *, channels="halves", table=None):
    """Turns q and k by their positions' angles.

    Args:
        q: (batch, heads, tokens, head_dim), fp32, bf16 or fp16, any strides; (batch, tokens, heads, head_dim) if unsqueeze_dim is 2.
        k: like q but for the number of heads; its dtype may differ.
        cos, sin: (tokens, width), (1 or batch, tokens, width), or these with a dimension of size 1 for the heads; any of the dtypes.
        position_ids: ignored: cos and sin belong to the tokens already. An int here is taken for unsqueeze_dim, which is where
            newer versions of transformers pass it.
        unsqueeze_dim: the dimension of q that counts the heads, 1 or 2.
        rotary_dim: r, the leading channels of a head that are turned; the others are copied. None: min(width, head_dim).
        channels: "halves" pairs the channels i and i + r/2, "pairs" 2i and 2i + 1; "pairs_to_halves" reads pairs and writes halves.
        table: the columns of pair i's two channels: "halves" i and i + r/2, "pairs" 2i and 2i + 1, "shared" i for both (only r/2
            columns are read); "complex": cos is the real view of r/2 complex numbers, column 2i pair i's cosine and 2i + 1 its sine,
            and sin, of the same shape, is not read: pass cos again. None: "shared" when the width is not r, else "pairs" for
            channels "pairs" and "halves" otherwise.

    Returns:
        (q', k'), shapes and dtypes of q and k, in memory of their own with q's and k's order of tokens and heads. q and k keep
        their values. Arithmetic is fp32. Gradients go to q and k only, and are laid out like them. Of DTensors every rank turns its
        own heads, and the results are DTensors.

    Raises:
        ValueError: shapes that do not fit, rotary_dim odd or outside (0, head_dim], too few columns, unknown names.
        RuntimeError: tensors on different devices, or of another dtype.
    """
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, channels, table)


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(q', k') with channels paired as halves; see :func:`rope`."""
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Stands in for transformers' `apply_rotary_pos_emb` with half-split channels; cos narrower than the head turns only its first
    channels. See :func:`rope`."""
    if registry.choosing and (other := third_party("rope", q)) is not None:
        if isinstance(position_ids, int):
            position_ids, unsqueeze_dim = None, position_ids
        return other(q, k, cos, sin, position_ids, unsqueeze_dim, *(() if rotary_dim is None else (rotary_dim,)))
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_rotary_pos_emb_gpt_oss(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """`liger_rotary_pos_emb` over the whole head, with tables of head_dim / 2 columns as GPT-OSS builds them."""
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, q.shape[-1])


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """q, k (tokens, heads, head_dim), cos, sin (tokens, head_dim) -> (q', k') in their own dtypes; fp32 inside."""
    q, k = LigerRopeFunction.apply(q.unsqueeze(0), k.unsqueeze(0), cos, sin, None, 2)
    return q.squeeze(0), k.squeeze(0)


def liger_rotary_pos_emb_interleaved(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Channel pairs (2i, 2i + 1) with the angle of column i: tables hold the angles twice, one half after the other (GLM-4)."""
    r = min(cos.shape[-1], q.shape[-1]) if rotary_dim is None else rotary_dim
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, r, "pairs", "shared")


def liger_rotary_pos_emb_interleaved_table(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Channel pairs (2i, 2i + 1) with the values of columns 2i and 2i + 1: tables hold every angle twice in a row (GLM-4V text)."""
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, "pairs", "pairs")


def liger_rotary_pos_emb_deinterleave(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Channel pairs (2i, 2i + 1) read, halves (i, i + r/2) written: `apply_rotary_pos_emb_interleave` of the DeepSeek-V3 family."""
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, "pairs_to_halves")


def liger_rotary_pos_emb_one(x, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """`liger_rotary_pos_emb` of a single tensor, for models that turn q and k in two calls."""
    if isinstance(position_ids, int):
        position_ids, unsqueeze_dim = None, position_ids
    none = x.detach().narrow(_heads_dim(unsqueeze_dim), 0, 0)
    return LigerRopeFunction.apply(x, none, cos, sin, position_ids, unsqueeze_dim, rotary_dim)[0]


def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(q', k', cos, sin) without autograd; cos and sin as given, for :func:`rope_backward`."""
    rows_cos, rows_sin, options = _arguments(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, "halves", None)
    return *_rotate(q, k, rows_cos, rows_sin, options)[:2], cos, sin


def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(dq, dk) of q and k from the gradients of q' and k', which keep their values."""
    rows_cos, rows_sin, options = _arguments(dq, dk, cos, sin, position_ids, unsqueeze_dim, rotary_dim, "halves", None)
    (dq, q_outer), (dk, k_outer) = _layout(dq, options[0]), _layout(dk, options[0])
    return _rotate_back(dq, dk, rows_cos, rows_sin, options, (q_outer, k_outer))
