"""Patching one module: its parameters, hooks, name and class stay, attributes and bound methods are added."""

import dataclasses

from liger_kernel.patch import journal
from liger_kernel.patch.specs import ACTIVATIONS, Replacement


def bind_method(module, name, function):
    """Binds `function` to `module` as its method `name`. -> whether that changed anything

    A module that accelerate has hooked (device maps, offloading) keeps its hook: there `forward` is the hook's, and calls
    `_old_forward`.
    """
    if name == "forward" and "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__:
        name = "_old_forward"
    if journal.still_calls(module.__dict__.get(name), function):
        return False
    return journal.set_on_module(module, name, function.__get__(module, type(module)))


@dataclasses.dataclass(frozen=True)
class _Name:
    """A `_get_name` that can be compared, copied and pickled."""

    name: str

    def __call__(self):
        return self.name


def _adopt(module, cls, **attributes):
    """Makes `module` run and print like `cls`. -> whether that changed anything"""
    changed = [journal.set_on_module(module, name, value) for name, value in attributes.items()]
    changed.append(bind_method(module, "forward", cls.forward))
    if "extra_repr" in vars(cls):
        changed.append(bind_method(module, "extra_repr", cls.extra_repr))
    changed.append(journal.set_on_module(module, "_get_name", _Name(cls.__name__)))
    return any(changed)


def _wrapped_by_peft(module):
    """The modules inside a PEFT ModulesToSaveWrapper (each adapter's copy and the original), else `module` alone."""
    if hasattr(type(module), "adapter_layer_names") and "modules_to_save" in module._modules:
        return [*module.modules_to_save.values(), module.original_module]
    return [module]


def patch_rms_norm_module(module, offset=0.0, eps=1e-6, casting_mode="llama", in_place=True, row_mode=None):
    """Gives `module` the forward of LigerRMSNorm. eps is the module's own variance_epsilon or eps, if it has one."""
    cls = Replacement("rms_norm", "LigerRMSNorm").load()
    changed = [
        _adopt(inner, cls, offset=offset, casting_mode=casting_mode, in_place=in_place, row_mode=row_mode, impl=None, mode=None,
               variance_epsilon=getattr(inner, "variance_epsilon", getattr(inner, "eps", eps)))
        for inner in _wrapped_by_peft(module)
    ]
    return any(changed)


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
