"""Shapes and the error bounds of rms_norm_gated, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

# (rows, cols): one, around powers of two, tails of every width, heads of Gated DeltaNet, widths of Mamba-2, rows wider than a block's
# registers.
SHAPES = [
    (1, 1), (3, 7), (4, 31), (5, 64), (2, 65), (33, 127), (300, 128), (7, 1024), (3, 1025), (6, 3584), (2, 3588), (5, 8192), (2, 24576),
    (1, 33000),
]
# (rows, cols, group size)
GROUPED = [(3, 12, 4), (5, 64, 16), (2, 66, 33), (40, 2048, 256), (3, 8192, 1024), (2, 4100, 1025), (3, 6, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]
UNDERFLOW = 1e-35  # an activation below this may be zero: the CUDA approximations flush subnormals
FLUSHED = 2.0**-126  # AVX-512 rounds smaller numbers to a bf16 zero


def _groups(t, size):
    return t.unflatten(-1, (-1, size))


def bounds(dy, x, gate, weight, dtype, weight_dtype, eps=1e-6, norm_before_gate=True, group_size=None, activation="silu",
           casting_mode="llama"):
    """Absolute errors of (y, dx, dgate, dw) before their final rounding, from fp64 operands.

    e32: of the fp32 sum, rsqrt and products of a row. e: of the activation; |gate| of it is the rounding of the exponential's
    argument. e1: the mode's own rounding of hat; e2: of hat weight too. Gate first, e is in h, and the largest of a group in its rstd.
    """
    size = group_size or x.shape[-1]
    e32, u, least = 32 * U32, 1.01 * UNIT_ROUNDOFF[dtype], SMALLEST[dtype]
    llama = casting_mode == "llama"
    e1 = u if llama else 0.0
    e2 = e1 + (u if llama and norm_before_gate and weight_dtype == dtype else 0.0)
    z = torch.zeros_like(x) if gate is None else gate
    s = torch.sigmoid(z)
    e = (16 + 2 * z.abs().clamp(max=100)) * U32
    if gate is None:
        a, slope, slope_error = torch.ones_like(x), torch.zeros_like(x), torch.zeros_like(x)
    elif activation == "silu":
        a = (z * s).abs()
        slope, slope_error = s + a, (s + a) * e + UNDERFLOW  # sizes of the terms
    else:
        a, slope = s, s * torch.sigmoid(-z)
        slope_error = 2 * slope * e + UNDERFLOW
    value_error = a * e + UNDERFLOW
    w, dy = weight.abs(), dy.abs()

    def mean(t):
        return _groups(t, size).mean(-1, keepdim=True).expand_as(_groups(t, size)).reshape(t.shape)

    def largest(t):
        return _groups(t, size).amax(-1, keepdim=True).expand_as(_groups(t, size)).reshape(t.shape)

    h = x.abs() if norm_before_gate else x.abs() * a
    rstd = torch.rsqrt(mean(h.square()) + eps)
    hat = h * rstd
    terms = (8 + (x.numel() / x.shape[-1]) ** 0.5) * U32
    if norm_before_gate:
        t = dy * a
        g = t * w
        y = hat * w * (a * (e32 + e2) + value_error) + least * (w + 1) * a * llama
        dx = rstd * (g * (e32 + e) + hat * mean(g * hat * (e32 + e)) + hat * mean(g * hat) * e32)
        dgate = dy * (hat * w * (slope * (e32 + e2) + slope_error) + least * (w + 1) * slope * llama)
        dw = t * hat * (terms + e + e1) + t * least * llama
    else:
        e_row = largest(e)
        g = dy * w
        y = hat * w * (e32 + e + e_row + e2) + rstd * x.abs() * w * UNDERFLOW + least * w * llama
        dh = rstd * (g + hat * mean(g * hat))
        dh_error = dh * (e32 + 4 * e_row)
        dx = dh_error * a + dh * value_error
        dgate = x.abs() * (dh_error * slope + dh * slope_error)
        dw = dy * hat * (terms + 2 * e_row + e1) + dy * least * llama
    return y + FLUSHED, dx + FLUSHED, dgate + FLUSHED, dw.reshape(-1, x.shape[-1]).sum(0) + FLUSHED
