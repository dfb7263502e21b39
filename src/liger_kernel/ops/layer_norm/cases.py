"""Shapes and the error bounds of layer_norm, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF

# (rows, cols): one, around powers of two, tails of every width, model shapes, rows wider than one block's registers.
SHAPES = [
    (1, 1), (3, 7), (4, 31), (5, 64), (2, 65), (33, 127), (7, 1024), (3, 1025), (6, 3584), (2, 3588), (16, 4096), (9, 8192), (2, 16384),
    (2, 20480), (1, 33000),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
U32 = UNIT_ROUNDOFF[torch.float32]


def statistics(x, eps):
    """fp64 (x - mean) * rstd, mean and rstd of the rows."""
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
    return (x - mean) * rstd, mean, rstd


def forward_bound(truth, x, w, eps=1e-6):
    """Absolute error before the final rounding. Sums and rsqrt are within 32 u32 of their sizes, for the centred row too, whatever
    its mean: hat carries 32 u32 (|hat| + 1). Two more roundings for the product and the sum."""
    hat, _, _ = statistics(x, eps)
    return U32 * (32 * w.abs() * (hat.abs() + 1) + 2 * truth.abs())


def hat_error(x, eps):
    """Absolute error of hat in backward beside 32 u32 |hat|: mean is kept in fp32, so its rounding counts against the spread."""
    _, mean, rstd = statistics(x, eps)
    return U32 * (32 + 1.01 * mean.abs() * rstd)


def dx_bound(dy, x, w, eps=1e-6):
    """dx = rstd (g - mean(g) - hat mean(g hat)): a difference, so its error is on the sum of the sizes."""
    hat, _, rstd = statistics(x, eps)
    g, hat = (dy * w).abs(), hat.abs()
    mean_g, mean_g_hat = g.mean(-1, keepdim=True), (g * hat).mean(-1, keepdim=True)
    sizes = g + mean_g + hat * mean_g_hat
    return rstd * (64 * U32 * sizes + hat_error(x, eps) * (mean_g_hat + hat * mean_g))


def dw_bound(dy, x, eps=1e-6):
    """Sums over rows in fp32: random walk of n roundings on the sum of magnitudes, and the error of hat."""
    hat, _, _ = statistics(x, eps)
    each = dy.abs() * (hat.abs() * (40 + rows(x) ** 0.5) * U32 + hat_error(x, eps))
    return each.reshape(-1, x.shape[-1]).sum(0)


def db_bound(dy):
    return dy.abs().reshape(-1, dy.shape[-1]).sum(0) * (8 + rows(dy) ** 0.5) * U32


def rows(x):
    return max(1, x.shape[:-1].numel())
