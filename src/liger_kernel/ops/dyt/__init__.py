"""Dynamic tanh: y = tanh(alpha x) gamma + beta, in place of a norm (Zhu et al., "Transformers without Normalization", 2025,
arXiv 2503.10622)."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import on_shards
from liger_kernel.core.tensors import rows_or_whole, shaped, unit_stride

EXPORTS = ["LigerDyTFunction"]


@register_fake("liger_kernel::dyt_forward")
def _(x, alpha, gamma, beta):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_fake("liger_kernel::dyt_backward")
def _(dy, x, alpha, gamma, beta, want_dx, want_dalpha, want_dgamma, want_dbeta):
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format) if want_dx else dy.new_empty((0,))
    like_beta, cols = gamma if beta is None else beta, gamma.shape[0]
    return (dx, alpha.new_empty((1 if want_dalpha else 0,)), gamma.new_empty((cols if want_dgamma else 0,)),
            like_beta.new_empty((cols if want_dbeta else 0,)))


class LigerDyTFunction(torch.autograd.Function):
    """`apply(x, alpha, gamma, beta)`; see :func:`liger_dyt`. Saves x and the parameters; gradients have memory of their own."""

    @classmethod
    def apply(cls, x, alpha, gamma, beta):
        return on_shards(super().apply, (x,), (alpha, gamma, beta))  # out here, a DTensor gets a DTensor gradient

    @staticmethod
    def forward(ctx, x, alpha, gamma, beta):
        rows, gamma = rows_or_whole(x), unit_stride(gamma)
        beta = None if beta is None else unit_stride(beta)
        ctx.save_for_backward(rows, alpha, gamma, beta)
        return shaped(_ops.dyt_forward(rows, alpha, gamma, beta), x.shape)

    @staticmethod
    @first_derivative_only("dyt")
    def backward(ctx, dy):
        x, alpha, gamma, beta = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dx, dalpha, dgamma, dbeta = _ops.dyt_backward(rows_or_whole(dy), x, alpha, gamma, beta, *wanted)
        return (shaped(dx, dy.shape) if wanted[0] else None, dalpha.view(alpha.shape) if wanted[1] else None,
                dgamma if wanted[2] else None, dbeta if wanted[3] else None)


def liger_dyt(x, alpha, gamma, beta):
    """tanh(alpha x) gamma + beta.

    Args:
        x: [..., H], fp32, bf16 or fp16, any strides.
        alpha: one element; any of those dtypes, as for gamma and beta.
        gamma: [H].
        beta: [H], or None for none.

    Returns:
        [..., H] in x's dtype; fp32 inside, rounded once. Gradients are summed in fp32 and have the dtypes of their tensors.

    Raises:
        RuntimeError (ValueError before torch 2.12): lengths that do not fit, tensors on different devices, or of another dtype.
    """
    return LigerDyTFunction.apply(x, alpha, gamma, beta)


class LigerDyT(torch.nn.Module):
    """Dynamic tanh over [..., hidden_size] with learned alpha (1,), gamma and, if `beta`, beta; see :func:`liger_dyt`."""

    def __init__(self, hidden_size, beta=True, init_alpha=0.5):
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = torch.nn.Parameter(torch.full((1,), float(init_alpha)))
        self.gamma = torch.nn.Parameter(torch.ones(hidden_size))
        self.beta = torch.nn.Parameter(torch.zeros(hidden_size)) if beta else None

    def forward(self, x):
        return LigerDyTFunction.apply(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self):
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"
