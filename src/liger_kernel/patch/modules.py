"""Patching one module: its parameters, hooks, name and class stay, attributes and bound methods are added."""

import copyreg
import dataclasses
import functools
import importlib
import types

import torch

from liger_kernel.patch import journal
from liger_kernel.patch.specs import ACTIVATIONS, GatedNorm, Glu, LayerNorm, Norm, ReLUSquared, Replacement
from liger_kernel.transformers import functional

# --- pickle: torch.save(model), processes that are spawned, deepcopy ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A bound method on its way through pickle or deepcopy, which makes a bound method of it again."""

    function: types.FunctionType
    module: torch.nn.Module

    def __call__(self, *args, **kwargs):  # in a shallow copy
        return self.function(self.module, *args, **kwargs)

    def __reduce__(self):
        return _bound, (self.function, self.module)


def _bound(function, module):
    return function.__get__(module, type(module))


def _portable(value, module):
    return _Bound(value.__func__, module) if isinstance(value, types.MethodType) and value.__self__ is module else value


def state_of(module):
    """`__getstate__` of a patched module. pickle looks a bound method up by its function's name in the module, where it is either
    missing or the original's; ours go by the function itself."""
    state = dict(getattr(type(module), "__getstate__", vars)(module))
    undo = state[journal.UNDO]
    for name, (_, ours) in undo.items():
        if state.get(name) == ours:
            state[name] = _portable(ours, module)
    return {**state, journal.UNDO: {name: (old, _portable(ours, module)) for name, (old, ours) in undo.items()}}


def _reduce(self, protocol):
    """`__reduce_ex__` of a class whose name in the modelling module is ours now: pickle, which looks a class up by its name, would
    refuse the other one it finds."""
    _, arguments, *state = object.__reduce_ex__(self, max(protocol, 2))
    cls = type(self)
    if journal.replaced_by_us(importlib.import_module(cls.__module__), cls.__name__) is cls:
        return _new, (cls.__module__, cls.__name__, *arguments[1:]), *state
    return copyreg.__newobj__, arguments, *state


def _new(module, name, *arguments):
    module = importlib.import_module(module)
    cls = journal.replaced_by_us(module, name) or getattr(module, name)
    return cls.__new__(cls, *arguments)


# --- one module ---------------------------------------------------------------------------------------------------------------


def bind_method(module, name, function):
    """Binds `function` to `module` as its method `name`. -> whether that changed anything

    A module that accelerate has hooked (device maps, offloading) keeps its hook: there `forward` is the hook's, and calls
    `_old_forward`.
    """
    if name == "forward" and "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__:
        name = "_old_forward"
    if journal.still_calls(module.__dict__.get(name), function):
        return False
    journal.set_on_module(module, "__getstate__", state_of.__get__(module))
    return journal.set_on_module(module, name, function.__get__(module, type(module)))


@dataclasses.dataclass(frozen=True)
class _Name:
    """A `_get_name` that can be compared, copied and pickled."""

    name: str

    def __call__(self):
        return self.name


def _adopt(module, cls, forward=None, **attributes):
    """Makes `module` run (with another `forward`, if given) and print like `cls`. -> whether that changed anything"""
    changed = [journal.set_on_module(module, name, value) for name, value in attributes.items()]
    changed.append(bind_method(module, "forward", forward or cls.forward))
    if "extra_repr" in vars(cls):
        changed.append(bind_method(module, "extra_repr", cls.extra_repr))
    changed.append(journal.set_on_module(module, "_get_name", _Name(cls.__name__)))
    return any(changed)


def _wrapped_by_peft(module):
    """The modules inside a PEFT ModulesToSaveWrapper (each adapter's copy and the original), else `module` alone."""
    if hasattr(type(module), "adapter_layer_names") and "modules_to_save" in module._modules:
        return [*module.modules_to_save.values(), module.original_module]
    return [module]


@functools.cache
def casting_mode_of(cls):
    """Whether the RMSNorm class `cls` scales in fp32 ("gemma") or rounds first ("llama"): a weight in fp32 then widens the result."""
    with torch.no_grad():
        result = cls(2).float()(torch.ones(1, 2, dtype=torch.bfloat16))
    return "llama" if result.dtype == torch.float32 else "gemma"


def norm_with_or_without_weight(self, hidden_states):
    """LigerRMSNorm.forward for classes some of whose modules have no attribute `weight`."""
    return functional.LigerRMSNormFunction.apply(
        hidden_states, getattr(self, "weight", None), self.variance_epsilon, self.offset, self.casting_mode)


def patch_rms_norm_module(module, offset=0.0, eps=1e-6, casting_mode="llama", in_place=True, row_mode=None):
    """Gives `module` the forward of LigerRMSNorm. eps is the module's own variance_epsilon or eps, if it has one."""
    cls = Replacement("rms_norm", "LigerRMSNorm").load()
    changed = [
        _adopt(inner, cls, offset=offset, casting_mode=casting_mode, in_place=in_place, row_mode=row_mode, impl=None, mode=None,
               variance_epsilon=getattr(inner, "variance_epsilon", getattr(inner, "eps", eps)))
        for inner in _wrapped_by_peft(module)
    ]
    changed += [journal.set_on_module(inner, "weight", None) for inner in _wrapped_by_peft(module) if not hasattr(inner, "weight")]
    return any(changed)


def patch_layer_norm_module(module, eps=1e-6, weight_offset=0.0):
    """Gives `module` the forward of LigerLayerNorm. eps is the module's own variance_epsilon or eps, if it has one."""
    cls = Replacement("layer_norm", "LigerLayerNorm").load()
    changed = [
        _adopt(inner, cls, layer_norm_with_offset if weight_offset else None, weight_offset=weight_offset, impl=None, mode=None,
               hidden_size=getattr(inner, "hidden_size", None) or getattr(inner, "normalized_shape", None),
               variance_epsilon=getattr(inner, "variance_epsilon", getattr(inner, "eps", eps)))
        for inner in _wrapped_by_peft(module)
    ]
    return any(changed)


def layer_norm_with_offset(self, hidden_states):
    """LigerLayerNorm.forward with `weight_offset` added to the weight."""
    return functional.LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon, self.weight_offset)


def patch_glu_module(module, cls):
    """Gives `module` the forward of the gated MLP class `cls`."""
    changed = [_adopt(inner, cls) for inner in _wrapped_by_peft(module)]
    return any(changed)


def activation_mismatch(module, wanted):
    """Why the gated MLP `module` does not compute activation `wanted`, or None."""
    act = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    name = getattr(act, "__name__", type(act).__name__)
    return None if name in ACTIVATIONS[wanted] or name == wanted else f"its activation is {name}, not {wanted}"


def patch_geglu_module(module):
    """Gives `module` the forward of LigerGEGLUMLP."""
    return patch_glu_module(module, Replacement("geglu", "LigerGEGLUMLP").load())


# --- by the row's spec: a kind of layer is a spec and these three functions ----------------------------------------------------


def mismatch(spec, module):
    """Why `module` does not compute what `spec` says its class does, or None."""
    if (getattr(module.__dict__.get("forward"), "__module__", None) or "").startswith("transformers.distributed."):
        return "transformers' tensor or expert parallelism works in its forward"
    if isinstance(spec, GatedNorm):
        name = getattr(module, "activation", "silu")
        return None if name in ("silu", "swish", "sigmoid") else f"its activation is {name}"
    if isinstance(spec, LayerNorm):
        count = len(getattr(module, "normalized_shape", (1,)))
        return None if count == 1 else f"it normalises {count} dimensions together"
    return activation_mismatch(module, spec.activation) if hasattr(spec, "activation") else None


@functools.singledispatch
def patch_layer(spec, module):
    """Makes `module` compute like our class, as `spec` says. -> whether that changed anything"""


@functools.singledispatch
def class_attributes(spec, cls, ours):
    """{name: value} that make modules of transformers' class `cls` compute and print like our class `ours`."""


def patch_class(spec, modeling, cls, user):
    """Models built later find our class under the name (if it is to take the name); modules of `cls` get its forward in any case.
    -> whether that changed anything"""
    ours, changed = spec.replacement.load(), []
    if cls is ours:
        return False
    attributes = class_attributes(spec, cls, ours)
    if spec.rename:
        changed.append(journal.set_shared(modeling, cls.__name__, ours, user))
        attributes["__reduce_ex__"] = _reduce
    return any([*changed, *[journal.set_shared(cls, name, value, user) for name, value in attributes.items()]])


def _choosing(cls, spec, run):
    """A forward of class `cls`: `run`, unless the module turns out not to compute what `spec` says."""
    original = cls.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        return (run if mismatch(spec, self) is None else original)(self, *args, **kwargs)

    return forward


def _named(ours):
    return lambda self: ours.__name__


@patch_layer.register
def _(spec: Norm, module):
    casting_mode = spec.casting_mode or casting_mode_of(type(module))
    return patch_rms_norm_module(module, spec.offset, casting_mode=casting_mode, in_place=spec.in_place)


@class_attributes.register
def _(spec: Norm, cls, ours):
    attributes = dict(forward=ours.forward, extra_repr=ours.extra_repr, _get_name=_named(ours), offset=spec.offset, in_place=spec.in_place,
                      row_mode=None, casting_mode=spec.casting_mode or casting_mode_of(cls))
    if not spec.weight:
        attributes["forward"] = norm_with_or_without_weight
        del attributes["extra_repr"]
    if spec.eps != "variance_epsilon":
        attributes["variance_epsilon"] = property(lambda self, eps=spec.eps: getattr(self, eps))
    return attributes


def _group_size(spec, module):
    """Columns that the gated norm `module` normalises together, or None for all."""
    return module.weight.shape[0] // getattr(module, spec.groups) if spec.groups else getattr(module, "group_size", None)


@patch_layer.register
def _(spec: GatedNorm, module):
    cls, changed = spec.replacement.load(), []
    for inner in _wrapped_by_peft(module):
        order = inner.norm_before_gate if spec.norm_before_gate is None else spec.norm_before_gate
        changed.append(_adopt(
            inner, cls, norm_before_gate=order, casting_mode=spec.casting_mode, group_size=_group_size(spec, inner),
            activation=getattr(inner, "activation", "silu"),
            variance_epsilon=getattr(inner, "variance_epsilon", getattr(inner, "eps", None))))
    return any(changed)


@class_attributes.register
def _(spec: GatedNorm, cls, ours):
    attributes = dict(forward=_choosing(cls, spec, ours.forward), extra_repr=ours.extra_repr, _get_name=_named(ours), activation="silu",
                      casting_mode=spec.casting_mode, group_size=property(lambda self: _group_size(spec, self)) if spec.groups else None)
    return attributes if spec.norm_before_gate is None else {**attributes, "norm_before_gate": spec.norm_before_gate}


@patch_layer.register
def _(spec: LayerNorm, module):
    return patch_layer_norm_module(module, weight_offset=spec.weight_offset)


@class_attributes.register
def _(spec: LayerNorm, cls, ours):
    return dict(forward=_choosing(cls, spec, layer_norm_with_offset), extra_repr=ours.extra_repr, _get_name=_named(ours), impl=None,
                mode=None, weight_offset=spec.weight_offset, hidden_size=property(lambda self: self.normalized_shape),
                variance_epsilon=property(lambda self: self.eps))


@patch_layer.register
def _(spec: Glu, module):
    return patch_glu_module(module, spec.replacement.load())


@class_attributes.register
def _(spec: Glu, cls, ours):
    return dict(forward=_choosing(cls, spec, ours.forward), _get_name=_named(ours))


@patch_layer.register
def _(spec: ReLUSquared, module):
    return _adopt(module.act_fn, spec.replacement.load())


@class_attributes.register
def _(spec: ReLUSquared, cls, ours):
    return dict(forward=_choosing(cls, spec, lambda self, x: self.down_proj(ours.forward(self.act_fn, self.up_proj(x)))))
