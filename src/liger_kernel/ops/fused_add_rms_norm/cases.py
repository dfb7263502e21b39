"""Shapes and the error bound of fused_add_rms_norm, for its tests and for `liger numerics`.

The bounds are those of a norm of s: s itself is exact, being the correctly rounded sum that eager code normalises too."""

import torch

from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

# (rows, cols): one, around powers of two, tails of every width, model shapes, rows of 2, 4 and 8 vectors a thread on CUDA, rows
# wider than a block's threads hold.
SHAPES = [
    (1, 1), (3, 7), (4, 31), (5, 64), (2, 65), (33, 127), (7, 1024), (3, 1025), (6, 3584), (2, 3588), (16, 4096), (5, 8192), (2, 16384),
    (1, 33000),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def mode_rounding(s, mode, eps=1e-6):
    """Relative error that a casting mode's own roundings may add: "llama" rounds hat once; "none" rounds mean, eps, rstd, hat and
    w + offset, and the mean and eps of small fp16 rows are subnormal, so that their absolute rounding counts."""
    if mode == "gemma":
        return 0
    if mode == "llama":
        return 1.01 * UNIT_ROUNDOFF[s.dtype]
    mean = s.double().square().mean(-1, keepdim=True)
    return 4.1 * UNIT_ROUNDOFF[s.dtype] + SMALLEST[s.dtype] / (mean + eps)


def forward_bound(truth, s, mode, eps=1e-6):
    """Absolute error of y before the final rounding: the fp32 sum and rsqrt (32 u32), and the mode's own roundings."""
    return truth.abs() * (32 * UNIT_ROUNDOFF[torch.float32] + mode_rounding(s, mode, eps))


def dx_bound(dy, ds, s, w, rstd, extra):
    """dx - ds is a difference of two terms of size rstd |g| and rstd |hat| mean|g hat|: each carries 32 u32 (+ extra); adding ds
    costs one more fp32 rounding of the sum."""
    g = (dy * w).abs()
    hat = s.abs() * rstd
    size = rstd * (g + hat * (g * hat).mean(-1, keepdim=True))
    return size * (32 * UNIT_ROUNDOFF[torch.float32] + extra) + (size + ds.abs()) * UNIT_ROUNDOFF[torch.float32]


def dw_bound(dy, hat, extra):
    """Sums over rows in fp32: sqrt-free worst case n u32 on the sum of magnitudes, plus the rounding of hat."""
    magnitude = (dy * hat).abs().reshape(-1, hat.shape[-1])
    return magnitude.sum(0) * ((8 + magnitude.shape[0] ** 0.5) * UNIT_ROUNDOFF[torch.float32] + extra)
