"""RMSNorm with a gate, over the last dimension or groups of it: y = norm(x) weight act(gate) (Gated DeltaNet, arXiv 2412.06464) or
y = norm(x act(gate)) weight (Mamba-2, arXiv 2405.21060)."""

import math

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.autograd import first_derivative_only
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.sharded import on_shards
from liger_kernel.core.tensors import rows_or_whole, shaped, unit_stride

EXPORTS = ["LigerRMSNormGatedFunction"]

ROUNDING = {"llama": 0, "gemma": 1}  # what casting_mode names; the numbers are rms_norm's
ACTIVATION = {"silu": 0, "swish": 0, "sigmoid": 1}


@register_fake("liger_kernel::rms_norm_gated_forward")
def _(x, gate, weight, eps, group_size, norm_first, activation, rounding):
    rstd = x.new_empty((math.prod(x.shape[:-1]) * (x.shape[-1] // group_size),), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), rstd


@register_fake("liger_kernel::rms_norm_gated_backward")
def _(dy, x, gate, weight, rstd, group_size, norm_first, activation, rounding, want_dx, want_dgate, want_dw):
    dx, dgate = (dy.new_empty(dy.shape if want else (0,)) for want in (want_dx, want_dgate))
    return dx, dgate, (x if weight is None else weight).new_empty((x.shape[-1] if want_dw else 0,))


def _options(X, gate, W, norm_before_gate, group_size, activation, casting_mode):
    """(group size, norm first, activation, rounding) as the ops take them."""
    if X.dim() == 0:
        raise ValueError("rms_norm_gated: x has no dimension, expected [..., H]")
    columns = X.shape[-1]
    if gate is not None and gate.shape != X.shape:
        raise ValueError(f"rms_norm_gated: the gate is {tuple(gate.shape)}, x {tuple(X.shape)}; expand one to the other's shape")
    if W is not None and W.shape != X.shape[-1:]:
        raise ValueError(f"rms_norm_gated: weight is {tuple(W.shape)}, x has {columns} columns; they must be equal")
    if group_size is None:
        group_size = max(columns, 1)
    elif not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1 or columns % group_size:
        raise ValueError(f"rms_norm_gated: group_size is {group_size}, expected a divisor of the {columns} columns of x")
    if activation not in ACTIVATION:
        raise ValueError(f"rms_norm_gated: activation is {activation!r}, expected 'silu', 'swish' or 'sigmoid'")
    if casting_mode not in ROUNDING:
        raise ValueError(f"rms_norm_gated: casting_mode is {casting_mode!r}, expected 'llama' or 'gemma'")
    return group_size, bool(norm_before_gate), ACTIVATION[activation], ROUNDING[casting_mode]


class LigerRMSNormGatedFunction(torch.autograd.Function):
    """`apply(X, gate, W, eps=1e-6, norm_before_gate=True, group_size=None, activation="silu", casting_mode="llama")`; see
    :func:`liger_rms_norm_gated`. X and gate have one dtype.

    Saves X, gate, W and one fp32 number per group, and computes the activation again in backward, into memory of its own.
    """

    @classmethod
    def apply(cls, X, gate, W, *options):
        run = super().apply
        if gate is None:
            return on_shards(lambda x, w, *rest: run(x, None, w, *rest), (X,), (W,), options)
        return on_shards(run, (X, gate), (W,), options)  # out here, a DTensor gets a DTensor gradient

    @staticmethod
    def forward(ctx, X, gate, W, eps=1e-6, norm_before_gate=True, group_size=None, activation="silu", casting_mode="llama"):
        ctx.options = _options(X, gate, W, norm_before_gate, group_size, activation, casting_mode)
        x, z = rows_or_whole(X), gate if gate is None else rows_or_whole(gate)
        weight = W if W is None else unit_stride(W)
        y, rstd = _ops.rms_norm_gated_forward(x, z, weight, eps, *ctx.options)
        ctx.save_for_backward(x, z, weight, rstd)
        return shaped(y, X.shape)

    @staticmethod
    @first_derivative_only("rms_norm_gated")
    def backward(ctx, dY):
        x, z, weight, rstd = ctx.saved_tensors
        want = ctx.needs_input_grad[:3]
        gradients = _ops.rms_norm_gated_backward(rows_or_whole(dY), x, z, weight, rstd, *ctx.options, *want)
        dX, dgate = (shaped(d, dY.shape) if wanted else None for d, wanted in zip(gradients, want[:2], strict=False))
        return dX, dgate, gradients[2] if want[2] else None, None, None, None, None, None


def liger_rms_norm_gated(x, gate, weight, eps=1e-6, *, norm_before_gate=True, group_size=None, activation="silu", casting_mode="llama"):
    """RMSNorm and gate in one op.

    Args:
        x: [..., H], fp32, bf16 or fp16, any strides.
        gate: [..., H] or None for no gate. Where its dtype is another than x's, both are promoted, as eager code does.
        weight: [H], any of those dtypes, or None for no weight. Of a DTensor the full value is taken.
        eps: added to the mean square.
        norm_before_gate: True: norm(x) weight act(gate), as Qwen3-Next. False: norm(x act(gate)) weight, as Mamba-2.
        group_size: columns that are normalised together, a divisor of H; None: all.
        activation: "silu" (also called "swish") or "sigmoid".
        casting_mode: "llama" rounds the normalised row to x's dtype before the weight (and its product with a weight of that dtype
            before the gate), as Qwen3-Next, OLMo-Hybrid, Mamba-2, Bamba, Zamba-2, Nemotron-H and Granite-4 do; "gemma" rounds once
            at the end (Kimi-Linear, Falcon-H1).

    Returns:
        [..., H] in x's dtype; of a DTensor x a DTensor that lies as x does, but for whole rows on every rank. fp32 inside.

    Raises:
        ValueError: shapes, group size, activation or casting mode do not fit.
        RuntimeError (ValueError before torch 2.12): tensors on different devices, or of another dtype.
    """
    given = x.dtype
    if gate is not None and gate.dtype != given:
        dtype = torch.promote_types(given, gate.dtype)
        x, gate = x.to(dtype), gate.to(dtype)
    y = LigerRMSNormGatedFunction.apply(x, gate, weight, eps, norm_before_gate, group_size, activation, casting_mode)
    return y if y.dtype == given else y.to(given)


class LigerRMSNormGated(torch.nn.Module):
    """Gated RMSNorm with a learned weight [hidden_size]; see :func:`liger_rms_norm_gated` for the arithmetic.

    Parameters and attributes are called as in the classes of transformers (Qwen3NextRMSNormGated(hidden_size, eps),
    MambaRMSNormGated(hidden_size, group_size, eps) and the like). `forward` needs only the attributes weight, variance_epsilon,
    group_size, norm_before_gate, activation and casting_mode, so that it can be bound to their modules.
    """

    def __init__(self, hidden_size, eps=1e-6, group_size=None, norm_before_gate=True, activation="silu", casting_mode="llama", device=None,
                 dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.variance_epsilon, self.group_size, self.norm_before_gate, self.activation, self.casting_mode = (
            eps, group_size, norm_before_gate, activation, casting_mode)
        _options(self.weight, None, self.weight, norm_before_gate, group_size, activation, casting_mode)

    def forward(self, hidden_states, gate=None):
        return liger_rms_norm_gated(
            hidden_states, gate, self.weight, self.variance_epsilon, norm_before_gate=self.norm_before_gate, group_size=self.group_size,
            activation=self.activation, casting_mode=self.casting_mode)

    def extra_repr(self):
        return (f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, group_size={self.group_size}, "
                f"norm_before_gate={self.norm_before_gate}, activation={self.activation}")
