"""Decoder layers whose addition after attention and norm before the MLP are one op. Opt-in: it replaces the forward of whole layers.

Only layers written as below are taken; attention, the MLP, caches and gradient checkpointing stay transformers'.
"""

import ast
import functools
import inspect
import textwrap

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_kernel.ops.rms_norm import LigerRMSNorm
from liger_kernel.patch import engine, head_weight, journal, modules
from liger_kernel.patch.report import Report
from liger_kernel.patch.specs import Norm
from liger_kernel.transformers import functional

_STANDARD = """
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, _ = self.self_attn(...)
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + hidden_states
return hidden_states
""".splitlines()[1:]
_OUR_NORMS = (LigerRMSNorm.forward, modules.norm_with_or_without_weight)


@functools.cache
def attention_arguments(forward):
    """Those arguments of a decoder layer's forward that its attention gets, all by their own names, with their defaults, in order; None
    if the forward is not made of the statements of `_STANDARD`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    lines, passed, variadic = [], set(), tree.args.kwarg and tree.args.kwarg.arg
    for statement in tree.body[1:] if ast.get_docstring(tree) else tree.body:
        match statement:
            case ast.Assign([ast.Tuple([ast.Name("hidden_states"), ast.Name()])], ast.Call(called, [], keywords)):
                if not all(isinstance(k.value, ast.Name) and k.value.id == (k.arg or variadic) for k in keywords):
                    return None
                passed |= {k.value.id for k in keywords}
                lines.append(f"hidden_states, _ = {ast.unparse(called)}(...)")
            case _:
                lines.append(ast.unparse(statement))
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if lines != _STANDARD or not {"hidden_states", variadic} <= passed or parameters[0].name != "hidden_states":
        return None
    return {p.name: p.default for p in parameters[1:] if p.name in passed - {variadic}} if passed >= {p.name for p in parameters} else None


def _fused(layer, hidden_states, *args, **kwargs):
    """What `_STANDARD` computes."""
    defaults, (eps, offset, casting_mode) = layer._liger_fused
    residual = hidden_states
    arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    hidden_states = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **arguments)[0]
    hidden_states, residual = functional.liger_fused_add_rms_norm(
        hidden_states, residual, layer.post_attention_layernorm.weight, eps, offset, casting_mode)
    return residual + layer.mlp(hidden_states)


class FusedDecoderLayer(GradientCheckpointingLayer):
    """Where a layer's attributes meet transformers' checkpointing of our forward: some versions do it in the class's forward."""

    forward = _fused

    @classmethod
    def of(cls, layer):
        view = cls.__new__(cls)
        object.__setattr__(view, "__dict__", layer.__dict__)
        return view


def fused_forward(self, hidden_states, *args, **kwargs):
    """A decoder layer's forward, with its second norm and the addition before it in one op; the class's own while something else hangs
    on that norm (hooks, a device map, ZeRO-3)."""
    norm = self.post_attention_layernorm
    if "_hf_hook" in norm.__dict__ or head_weight.intercepted(norm, (), _OUR_NORMS) is not None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    if self.training and getattr(self, "gradient_checkpointing", False) and torch.is_grad_enabled():
        return FusedDecoderLayer.forward(FusedDecoderLayer.of(self), hidden_states, *args, **kwargs)
    return _fused(self, hidden_states, *args, **kwargs)


def _arithmetic(norm):
    """(eps, offset, casting mode) of an RMSNorm module, ours or one that the tables know; None for other modules."""
    spec = engine.spec_of("layers", type(norm))
    if isinstance(norm, LigerRMSNorm):
        return norm.variance_epsilon, norm.offset, norm.casting_mode
    if not isinstance(spec, Norm) or getattr(norm, "weight", None) is None:
        return None
    return getattr(norm, spec.eps), spec.offset, spec.casting_mode or modules.casting_mode_of(type(norm))


def fuse_residual_norms(model):
    """Makes the addition after attention and the norm before the MLP one op, in every decoder layer of the standard form.

    The results are those of the unfused layers but for rounding. It goes with `patch_model`, in either order, and may be used
    without it; `liger_kernel.patch.unpatch(model)` takes both back.

    Args:
        model: a transformers model. Layers of another form (checked by their source) stay as they are.

    Returns:
        The :class:`liger_kernel.patch.Report`.
    """
    report = Report(f"{type(model).__name__} (residual norms)")
    for name, layer in model.named_modules():
        norm = getattr(layer, "post_attention_layernorm", None)
        if norm is None or not hasattr(layer, "self_attn"):
            continue
        kind, defaults, arithmetic = type(layer).__name__, attention_arguments(type(layer).forward), _arithmetic(norm)
        current = layer.__dict__.get("_old_forward" if "_hf_hook" in layer.__dict__ else "forward")
        if defaults is None:
            report.leave(name, f"the forward of {kind} has another form")
        elif arithmetic is None:
            report.leave(name, f"its norm is a {type(norm).__name__}, no RMSNorm with a weight")
        elif getattr(current, "__func__", current) not in (None, type(layer).forward, fused_forward):
            report.leave(name, "its forward has been replaced by other code")
        else:
            journal.set_on_module(layer, "_liger_fused", (defaults, arithmetic))
            report.changed(modules.bind_method(layer, "forward", fused_forward), name, f"{kind}.forward", "liger_fused_add_rms_norm")
    return engine.finish(report)
