"""Layout helpers that the ops' Python sides share."""


def unit_stride(t):
    """`t`, copied only when its last dimension is not contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def as_rows(t):
    """`t` [..., H] as [rows, H] with contiguous columns; a view where the strides allow one."""
    if t.dim() != 2:
        t = t.reshape(-1, t.shape[-1]) if t.shape[-1] else t.reshape(t.shape[:-1].numel(), 0)
    return unit_stride(t)


def gather_dtensor(t):
    """A DTensor's full value as a plain tensor (differentiable); anything else as it is."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t
