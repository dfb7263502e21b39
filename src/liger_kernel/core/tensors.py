"""Layout helpers that the ops' Python sides share."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the kernels' operands


def unit_stride(t):
    """`t`, copied only when its last dimension is not contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def as_rows(t):
    """`t` [..., H] as [rows, H] with contiguous columns; a view where the strides allow one."""
    if t.dim() != 2:
        t = t.reshape(-1, t.shape[-1]) if t.shape[-1] else t.reshape(t.shape[:-1].numel(), 0)
    return unit_stride(t)


def rows_or_whole(t):
    """`t` itself where it has no gaps, else :func:`as_rows`: what ops take that keep their input's shape.

    Saves an eager call two views (6 us). A compiler sees through them, but would guard on what `is_contiguous` reads.
    """
    if torch.compiler.is_compiling():
        return as_rows(t)
    if t.dim() and t.is_contiguous():
        return t
    with torch.enable_grad():  # what a forward saves descends from its input: see core/autograd.py
        return as_rows(t)


def shaped(t, shape):
    """`t`, which has `shape` or is its rows, with that shape."""
    return t if t.dim() == len(shape) else t.view(shape)


def _wrong_dtype(op):
    return RuntimeError(f"{op}: takes fp32, bf16 and fp16 tensors; cast the input first")


def check_dtypes(op, *tensors):
    """RuntimeError unless all are fp32, bf16 or fp16: what the kernels say themselves, for callers that convert before they are called,
    or call another op's."""
    if any(t.dtype not in DTYPES for t in tensors):
        raise _wrong_dtype(op)


def product_dtype(op, *tensors):
    """The dtype of products of `tensors`: autocast's where it is on, else what they promote to.

    Raises:
        RuntimeError: one is not of floats, or the result none of fp32, bf16 and fp16.
    """
    first, *others = tensors
    if not first.is_meta and torch.is_autocast_enabled(first.device.type):
        dtype = torch.get_autocast_dtype(first.device.type)
    else:
        dtype = first.dtype
        for t in others:
            dtype = torch.promote_types(dtype, t.dtype)
    if dtype not in DTYPES or not all(t.is_floating_point() for t in tensors):
        raise _wrong_dtype(op)
    return dtype


def gather_dtensor(t):
    """A DTensor's full value as a plain tensor (differentiable); anything else as it is."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def rows_apart(rows):
    """Whether results may be written over `rows`, as of :func:`as_rows` or :func:`rows_or_whole`: no two of them share memory."""
    return rows.dim() != 2 or rows.shape[0] <= 1 or rows.stride(0) >= rows.shape[1]


def in_leaf(t):
    """Whether `t` lies in the memory of a leaf that requires grad, such as a parameter, which autograd lets nobody overwrite."""
    leaf = t._base if t._is_view() else t
    return leaf.is_leaf and leaf.requires_grad


def has_values(t):
    """Whether the host may read `t`: not of a tensor that stands for its shape alone (meta, FakeTensor), or is being traced."""
    return not (t.is_meta or isinstance(t, (FakeTensor, FunctionalTensor)))
