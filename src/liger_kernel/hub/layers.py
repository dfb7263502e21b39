"""Layers in the form that the `kernels` package takes: forward alone, bound to a module that has the state.

`kernels` names what may be replaced, not what it computes: "RMSNorm" stands on classes that round before they scale and on others
that round last, and one model's "rotary_pos_emb" has turned the other way. So a layer here asks, once for each class that it is
bound to, by running that class on a few numbers; where it would compute something else, the class's own forward runs."""

import functools

import torch
from torch import nn

from liger_kernel.patch.specs import ACTIVATIONS
from liger_kernel.transformers import functional

# (weight offset, casting mode) of the RMSNorm bodies that there are, and the names of their epsilon.
_CASTINGS = ((0.0, "llama"), (0.0, "gemma"), (1.0, "gemma"))
_EPSILONS = ("variance_epsilon", "eps")


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")


def _runs(function, *arguments):
    """What the original returns, or None when it cannot run on a stand-in."""
    try:
        return function(*arguments)
    except Exception:  # noqa: BLE001  it is someone else's code
        return None


@functools.cache
def _rms_norm_of(cls):
    """(name of the epsilon, weight offset, casting mode) of an RMSNorm class, found by running its forward in bf16, where the order of
    rounding shows; None when it is none of these."""
    with torch.no_grad():
        x, weight = _noise(16, 64).bfloat16(), _noise(64).bfloat16()
        hat = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 0.25)
        for name in _EPSILONS:
            module = cls.__new__(cls)
            nn.Module.__init__(module)
            module.weight = nn.Parameter(weight)
            setattr(module, name, 0.25)
            theirs = _runs(cls.forward, module, x)
            for offset, casting in _CASTINGS:
                ours = weight * hat.bfloat16() if casting == "llama" else ((offset + weight.float()) * hat).bfloat16()
                if theirs is not None and torch.equal(ours, theirs):
                    return name, offset, casting
    return None


@functools.cache
def _rotation_of(cls):
    """The table widths, as fractions of the head, for which the function module `cls` turns the whole head in halves."""
    widths = []
    with torch.no_grad():
        q, k, angles = _noise(1, 2, 3, 8), _noise(1, 1, 3, 8), _noise(1, 3, 4)
        for copies in (2, 1):
            cos, sin = angles.cos().repeat(1, 1, copies), angles.sin().repeat(1, 1, copies)
            theirs = _runs(cls.forward, None, q, k, cos, sin)
            ours = functional.LigerRopeFunction.apply(q, k, cos, sin, None, 1, 8)
            if theirs is not None and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True)):
                widths.append(copies / 2)
    return tuple(widths)


# torch.compile runs these two while it traces, and keeps their answer.
@torch.compiler.assume_constant_result
def rms_norm_of(cls):
    """Cached :func:`_rms_norm_of`."""
    return _rms_norm_of(cls)


@torch.compiler.assume_constant_result
def rotation_of(cls):
    """Cached :func:`_rotation_of`."""
    return _rotation_of(cls)


def _activates(module, activation):
    """Whether a gated MLP has that activation; the name of its layer says so where it has none of the usual attributes."""
    act = getattr(module, "act_fn", None)
    return act is None or getattr(act, "__name__", type(act).__name__) in (activation, *ACTIVATIONS[activation])


def _rms_norm(module, x, offset, casting):
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return functional.LigerRMSNormFunction.apply(x, module.weight, eps, offset, casting)


class LigerRMSNorm(nn.Module):
    """The RMSNorm that the module's class computes: for the names "RMSNorm" and "RMSNormZeroCentered"."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states):
        found = rms_norm_of(type(self))
        if found is None:
            return type(self).forward(self, hidden_states)
        name, offset, casting = found
        return functional.LigerRMSNormFunction.apply(hidden_states, self.weight, getattr(self, name), offset, casting)


class LigerRMSNormRoundThenScale(nn.Module):
    """w round(x rstd), whatever the class computes: Llama, Mistral, Qwen."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states):
        return _rms_norm(self, hidden_states, 0.0, "llama")


class LigerRMSNormScaleThenRound(nn.Module):
    """round(w x rstd): OLMo-2, GPT-OSS."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states):
        return _rms_norm(self, hidden_states, 0.0, "gemma")


class LigerRMSNormZeroCentered(nn.Module):
    """round((1 + w) x rstd): Gemma, Qwen3.5."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states):
        return _rms_norm(self, hidden_states, 1.0, "gemma")


class LigerRotaryPosEmb(nn.Module):
    """For "rotary_pos_emb": turns q and k with tables as wide as the head, or half as wide (GPT-OSS)."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        if cos.shape[-1] / q.shape[-1] not in rotation_of(type(self)):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        return functional.LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim, q.shape[-1])


class LigerSwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) up_proj(x))."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        if not _activates(self, "silu"):
            return type(self).forward(self, x)
        return self.down_proj(functional.LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLP(nn.Module):
    """down_proj(gelu(gate_proj(x)) up_proj(x)) with the tanh form of gelu."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        if not _activates(self, "gelu_tanh"):
            return type(self).forward(self, x)
        return self.down_proj(functional.LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerForCausalLMLossLayer(nn.Module):
    """transformers' ForCausalLMLoss of logits (batch, length, vocab_size), in fp32."""

    can_torch_compile = True
    has_backward = True

    def forward(self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
        from liger_kernel.transformers.model.loss_utils import liger_causal_lm_loss

        return liger_causal_lm_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)


# Names that transformers' own mapping asks repositories for. "Tiled" is about memory; the result is the same, and ours is not tiled.
LigerTiledSwiGLUMLP = LigerSwiGLUMLP
LigerTiledGEGLUMLP = LigerGEGLUMLP
apply_rotary_transformers = LigerRotaryPosEmb
