"""Patches models by the rows of `patch.models`. One instance: bound methods on its modules. A whole class: the names in its
modelling module, for models built later, and the forwards of the classes themselves, for models that exist already."""

import functools
import importlib
import inspect
import logging
import types

import torch

from liger_kernel.patch import causal_lm, journal, modules
from liger_kernel.patch.models import by_type, known, rows
from liger_kernel.patch.report import Report
from liger_kernel.patch.specs import LayerNorm

logger = logging.getLogger("liger_kernel")

_KINDS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared")
_LAYER_NORM = LayerNorm()  # torch.nn.LayerNorm, in whatever model it is


def flags_of(row, given):
    """The row's flags with their defaults; None means off. With **kwargs, all kinds of layers are flags and on, and other names are
    ignored; without, TypeError for a name that the row does not have."""
    defaults = {name: default for name, default in row.parameters if name not in ("model", "**kwargs")}
    unknown = sorted(set(given) - set(defaults))
    if ("**kwargs", None) in row.parameters:
        defaults = {**dict.fromkeys(_KINDS, True), **defaults}
    elif unknown:
        raise TypeError(f"apply_liger_kernel_to_{row.name}() has no option {', '.join(unknown)}; it has {', '.join(defaults)}")
    flags = {name: bool(given.get(name, default)) for name, default in defaults.items()}
    assert not (flags.get("cross_entropy") and flags.get("fused_linear_cross_entropy")), (
        "cross_entropy and fused_linear_cross_entropy cannot both be True: the fused loss replaces the other"
    )
    for name, served in {"rope": row.ropes, "swiglu": row.mlps, "geglu": row.mlps}.items():
        if flags.get(name) and not defaults[name] and not served:
            logger.warning("liger_kernel: %s=True has no effect on %s: no op of ours computes it", name, row.name)
    return flags


def _row(model_type):
    if model_type not in by_type():
        raise ValueError(f"liger_kernel has no row for model type {model_type!r}; it has {', '.join(by_type())}")
    return by_type()[model_type]


@functools.cache
def _all(kind):
    """{(module, class name): spec} of every row: composite models hold other models' modules."""
    return {(row.module, name): spec for row in rows().values() for name, spec in getattr(row, kind).items()}


def spec_of(kind, cls, row=None):
    """What the tables, `row` first, say about exactly this class: other packages have classes of the same names."""
    if kind == "layers" and cls is torch.nn.LayerNorm:
        return _LAYER_NORM
    own = getattr(row, kind).get(cls.__name__) if row is not None and row.module == cls.__module__ else None
    return own or _all(kind).get((cls.__module__, cls.__name__))


def _modeling(row):
    """The row's modelling module; an empty one when the installed transformers lacks it."""
    try:
        return importlib.import_module(row.module)
    except ModuleNotFoundError as missing:
        if not row.module.startswith(str(missing.name)):
            raise
        return types.ModuleType(row.module)


def finish(report):
    for line in str(report).splitlines():
        logger.debug("%s", line)
    return report


def _patch_ropes(row, flags, user, report):
    """Rotation is a global function of the modelling module, so that it changes for the whole process."""
    modeling = _modeling(row)
    for name, replacement in row.ropes.items():
        where, now = f"{row.module}.{name}", f"{replacement.name} (whole process)"
        if not hasattr(modeling, name):
            report.leave(where, "not in the installed transformers")
        elif flags.get("rope"):
            report.changed(journal.set_shared(modeling, name, replacement.load(), user), where, name, now)
        else:
            journal.restore_shared(user, modeling, name)
            report.off(where, "rope is off", name, now, (modeling, name))
    _leave(row, modeling, inspect.isfunction, report)


def _leave(row, modeling, kind, report):
    """Reports the functions or classes of the row that nothing of ours stands in for."""
    for name, why in row.left.items():
        if kind(getattr(modeling, name, None)):
            report.leave(name, why)


# --- one model ---------------------------------------------------------------------------------------------------------------


def _head_class(module):
    """The first class of `module` that a table knows to have a language-model head."""
    return next((cls for cls in type(module).__mro__ if spec_of("heads", cls)), None)


def _check_accepted(row, model):
    if row.accepts and not any(cls.__name__ in row.accepts for module in model.modules() for cls in type(module).__mro__):
        raise row.rejects_with(f"apply_liger_kernel_to_{row.name}() got a {type(model).__name__}; it takes {', '.join(row.accepts)}")


def _with_rotations(row, model):
    """The rows whose rotations `model` uses: its own, its parts', and those of the modelling modules that its classes are from."""
    used = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    return {r.module: r for r in (*(r for r in rows().values() if r.module in used), *map(_row, row.parts), row)}.values()


def _patch_module(name, module, row, flags, report):
    cls, kind = type(module), type(module).__name__
    spec = spec_of("layers", cls, row)
    if spec is not None:
        flag = row.flag_of(spec)
        off = f"{flag} is off" if flag in flags else f"{row.name} has no option {flag}"
        why = modules.mismatch(spec, module) if flags.get(flag) else off
        if why is None:
            new = modules.patch_layer(spec, module)
            report.changed(new, name, kind, spec.replacement.name if module._get_name() == kind else module._get_name())
        elif flags.get(flag, True):
            report.leave(name, why)
        else:
            for inner in module.modules():
                journal.restore_module(inner)
            report.off(name, why, kind, f"{module._get_name()} (all of its class)", (cls, "forward"))
    elif cls.__module__.startswith("liger_kernel."):
        report.changed(False, name, kind, kind)
    elif kind in known("left"):
        report.leave(name, f"{kind}: {known('left')[kind]}")
    elif kind.endswith(("Norm", "MLP", "Experts", "NormGated")):
        report.leave(name, f"{kind} is in no table")


def patch_model(model, **flags):
    """Replaces modules, loss and rotation of one model.

    Only `model` changes, but for the rotation, a function of its modelling module that all models of the process share (it
    gives the same numbers). Parameters, buffers, hooks, names and classes stay, so checkpoints and sharding plans do too.

    Args:
        model: a transformers model, loaded or built; PEFT wrappers may be around it or inside.
        **flags: those of apply_liger_kernel_to_<model>, e.g. rms_norm=False.

    Returns:
        The :class:`Report`. Patching twice changes nothing more; what a later call turns off goes back.

    Raises:
        ValueError: no row for its model type.
        TypeError: an unknown flag; a model that the row does not take (Llama 4: ValueError).
        AssertionError: cross_entropy and fused_linear_cross_entropy both on.
    """
    return patch_model_by(_row(getattr(getattr(model, "config", None), "model_type", None)), model, **flags)


def patch_model_by(row, model, **flags):
    """`patch_model` with the row given."""
    flags = flags_of(row, flags)
    _check_accepted(row, model)
    report = Report(f"{type(model).__name__} ({row.name})")
    for part in _with_rotations(row, model):
        _patch_ropes(part, flags, model, report)
    heads = 0
    for name, module in list(model.named_modules()):
        if (cls := _head_class(module)) is not None:
            heads += 1
            causal_lm.patch_head(name or "model", module, cls, spec_of("heads", cls), flags, report)
        _patch_module(name, module, row, flags, report)
    if not heads:
        report.leave("loss", f"{type(model).__name__} has no language-model head that a table knows")
    return finish(report)


# --- classes -----------------------------------------------------------------------------------------------------------------


def _modeling_class(modeling, name, report):
    """The class `name` as transformers defines it, or None when the installed version lacks it."""
    cls = journal.replaced_by_us(modeling, name) or getattr(modeling, name, None)
    if cls is None:
        report.leave(f"{modeling.__name__}.{name}", "not in the installed transformers")
    return cls


def _patch_layers(row, modeling, flags, user, report):
    for name, spec in row.layers.items():
        cls, flag = _modeling_class(modeling, name, report), row.flag_of(spec)
        if cls is None:
            continue
        if flags.get(flag):
            report.changed(modules.patch_class(spec, modeling, cls, user), name, name, spec.replacement.name)
        else:
            journal.restore_shared(user, modeling, name)
            journal.restore_shared(user, cls)
            report.off(name, f"{flag} is off", name, spec.replacement.name, (cls, "forward"))
    _leave(row, modeling, inspect.isclass, report)


def patch_classes(model_type, **flags):
    """Replaces classes, loss and rotation for all models of one type in this process, those built before included.

    Args:
        model_type: a model type of the tables, e.g. "llama".
        **flags: as for :func:`patch_model`. layer_norm reaches the model's own classes; torch.nn.LayerNorm is everybody's.

    Returns:
        The :class:`Report`.

    Raises:
        ValueError: no row for the type. TypeError, AssertionError: as for :func:`patch_model`.
    """
    return patch_classes_by(_row(model_type), **flags)


def patch_classes_by(row, **flags):
    """`patch_classes` with the row given."""
    flags = flags_of(row, flags)
    modeling = _modeling(row)
    report = Report(row.module)
    for part in (row, *map(_row, row.parts)):
        _patch_ropes(part, flags, row.name, report)
        _patch_layers(part, _modeling(part), flags, row.name, report)
    for name, head in row.heads.items():
        if (cls := _modeling_class(modeling, name, report)) is not None:
            causal_lm.patch_head_class(cls, head, flags, row.name, report)
    if ("layer_norm", True) in row.parameters and flags["layer_norm"]:
        report.leave("torch.nn.LayerNorm", "other models use it too; it is replaced in a model that is given")
    return finish(report)


# --- back --------------------------------------------------------------------------------------------------------------------


def unpatch(target=None):
    """Takes patches back.

    Args:
        target: a model: its modules, loss and (unless others use it) rotation go back. A model type: its classes do. Models
            built while their classes were patched keep our modules. None: everything that the process shares.

    Returns:
        The :class:`Report`; what other code has replaced since is left and named.
    """
    if target is None or isinstance(target, str):
        report = Report(target or "all classes")
        for restored in journal.restore_shared(target and _row(target).name):
            report.changed(True, restored, "ours", "the original")
        return finish(report)
    report = Report(type(target).__name__)
    for name, module in target.named_modules():
        restored, left = journal.restore_module(module)
        if restored:
            report.changed(True, name or "model", "ours", "the original")
        for attribute in left:
            report.leave(f"{name}.{attribute}" if name else attribute, "replaced by other code since")
    for restored in journal.restore_shared(target):
        report.changed(True, restored, "ours", "the original")
    return finish(report)


