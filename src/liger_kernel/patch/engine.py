"""Patches models by the rows of `patch.models`. One instance: bound methods on its modules. A whole class: the names in its
modelling module, for models built later, and the forwards of the classes themselves, for models that exist already."""

import functools
import importlib
import logging

from liger_kernel.patch import journal, modules
from liger_kernel.patch.models import by_type, known
from liger_kernel.patch.report import Report

logger = logging.getLogger("liger_kernel")


def flags_of(row, given):
    """The row's flags with their defaults; None means off. TypeError for a name the row does not have."""
    defaults = {name: default for name, default in row.parameters if name != "model"}
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise TypeError(f"apply_liger_kernel_to_{row.name}() has no option {', '.join(unknown)}; it has {', '.join(defaults)}")
    flags = {name: bool(given.get(name, default)) for name, default in defaults.items()}
    assert not (flags.get("cross_entropy") and flags.get("fused_linear_cross_entropy")), (
        "cross_entropy and fused_linear_cross_entropy cannot both be True: the fused loss replaces the other"
    )
    return flags


def _finish(report):
    for line in str(report).splitlines():
        logger.debug("%s", line)
    return report


def _patch_ropes(row, flags, user, report):
    """Rotation is a global function of the modelling module, so that it changes for the whole process."""
    modeling = importlib.import_module(row.module)
    for name, replacement in row.ropes.items():
        where = f"{row.module}.{name}"
        if not flags.get("rope"):
            report.leave(where, "rope is off")
        elif not hasattr(modeling, name):
            report.leave(where, "not in the installed transformers")
        else:
            report.changed(journal.set_shared(modeling, name, replacement.load(), user), where, name, f"{replacement.name} (whole process)")


def _loss_function():
    from liger_kernel.transformers.model import loss_utils

    return loss_utils.liger_causal_lm_loss


# --- one model ---------------------------------------------------------------------------------------------------------------


def _row_of(model):
    kind = getattr(getattr(model, "config", None), "model_type", None)
    row = by_type().get(kind)
    if row is None:
        raise ValueError(f"liger_kernel has no row for model type {kind!r} ({type(model).__name__}); it has {', '.join(by_type())}")
    return row


def _head_class(module):
    """The first class of `module` that a table knows to have a language-model head."""
    return next((cls for cls in type(module).__mro__ if cls.__name__ in known("heads")), None)


def _patch_module(name, module, row, flags, report):
    kind = type(module).__name__
    norm = row.norms.get(kind) or known("norms").get(kind)
    glu = row.mlps.get(kind) or known("mlps").get(kind)
    if norm is not None:
        if flags.get("rms_norm"):
            new = modules.patch_rms_norm_module(module, norm.offset, casting_mode=norm.casting_mode, in_place=norm.in_place)
            report.changed(new, name, kind, "LigerRMSNorm")
        else:
            report.leave(name, "rms_norm is off")
    elif glu is not None:
        why = modules.activation_mismatch(module, glu.activation) if flags.get(row.mlp_flag) else f"{row.mlp_flag} is off"
        if why is None:
            cls = glu.replacement.load()
            report.changed(modules.patch_glu_module(module, cls), name, kind, cls.__name__)
        else:
            report.leave(name, why)
    elif type(module).__module__.startswith("liger_kernel."):
        report.changed(False, name, kind, kind)
    elif kind.endswith(("Norm", "MLP")):
        report.leave(name, f"{kind} is in no table")


def _patch_loss(name, module, flags, report):
    cls = _head_class(module)
    head = known("heads")[cls.__name__]
    if flags.get("fused_linear_cross_entropy"):
        forward = head.load()
        current = module.__dict__.get("forward")
        new = modules.bind_method(module, "forward", forward)
        if new and current is not None:
            other = getattr(current, "__qualname__", current)
            report.leave(name or "model", f"its forward had been replaced by {other}, which now serves calls without labels only")
        report.changed(new, name or "model", f"{type(module).__name__}.forward", f"{head.file}.{head.function}")
    elif flags.get("cross_entropy"):
        new = journal.set_on_module(module, "_loss_function", _loss_function())
        report.changed(new, name or "model", "loss_function", "liger_causal_lm_loss")
    else:
        report.leave(name or "model", "fused_linear_cross_entropy and cross_entropy are off")


def patch_model(model, **flags):
    """Replaces modules, loss and rotation of one model.

    Only `model` changes, but for the rotation, a function of its modelling module that all models of the process share (it
    gives the same numbers). Parameters, buffers, hooks, names and classes stay, so checkpoints and sharding plans do too.

    Args:
        model: a transformers model, loaded or built; PEFT wrappers may be around it or inside.
        **flags: those of apply_liger_kernel_to_<model>, e.g. rms_norm=False.

    Returns:
        The :class:`Report`. Patching twice changes nothing more.

    Raises:
        ValueError: no row for its model type.
        TypeError: an unknown flag.
        AssertionError: cross_entropy and fused_linear_cross_entropy both on.
    """
    return patch_model_by(_row_of(model), model, **flags)


def patch_model_by(row, model, **flags):
    """`patch_model` with the row given."""
    flags = flags_of(row, flags)
    report = Report(f"{type(model).__name__} ({row.name})")
    _patch_ropes(row, flags, model, report)
    found_head = False
    for name, module in list(model.named_modules()):
        if _head_class(module) is not None:
            found_head = True
            _patch_loss(name, module, flags, report)
        _patch_module(name, module, row, flags, report)
    if not found_head:
        report.leave("loss", f"{type(model).__name__} has no language-model head that a table knows")
    return _finish(report)


# --- classes -----------------------------------------------------------------------------------------------------------------


def _modeling_class(modeling, name, report):
    """The class `name` as transformers defines it, or None when the installed version lacks it."""
    cls = journal.replaced_by_us(modeling, name) or getattr(modeling, name, None)
    if cls is None:
        report.leave(f"{modeling.__name__}.{name}", "not in the installed transformers")
    return cls


def _replace_class(modeling, cls, ours, user, attributes):
    """Models built later find `ours` under the name; those built before get its forward through their class."""
    if cls is ours:
        return False
    changed = [journal.set_shared(modeling, cls.__name__, ours, user)]
    attributes.update(_get_name=lambda self: ours.__name__)
    changed += [journal.set_shared(cls, name, value, user) for name, value in attributes.items()]
    return any(changed)


def _guarded(cls, ours, activation):
    """A forward for the existing modules of `cls`, whose activations are not known."""
    original = cls.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        run = ours.forward if modules.activation_mismatch(self, activation) is None else original
        return run(self, *args, **kwargs)

    return forward


def patch_classes(model_type, **flags):
    """Replaces classes, loss and rotation for all models of one type in this process, those built before included.

    Args:
        model_type: a model type of the tables, e.g. "llama".
        **flags: as for :func:`patch_model`.

    Returns:
        The :class:`Report`.

    Raises:
        ValueError: no row for the type. TypeError, AssertionError: as for :func:`patch_model`.
    """
    if model_type not in by_type():
        raise ValueError(f"liger_kernel has no row for model type {model_type!r}; it has {', '.join(by_type())}")
    return patch_classes_by(by_type()[model_type], **flags)


def patch_classes_by(row, **flags):
    """`patch_classes` with the row given."""
    flags = flags_of(row, flags)
    modeling = importlib.import_module(row.module)
    report = Report(row.module)
    _patch_ropes(row, flags, row.name, report)
    for name, norm in row.norms.items():
        if not flags.get("rms_norm"):
            report.leave(name, "rms_norm is off")
        elif (cls := _modeling_class(modeling, name, report)) is not None:
            ours = norm.replacement.load()
            attributes = dict(forward=ours.forward, extra_repr=ours.extra_repr, offset=norm.offset, casting_mode=norm.casting_mode,
                              in_place=norm.in_place, row_mode=None)
            if norm.eps != "variance_epsilon":
                attributes["variance_epsilon"] = property(lambda self, eps=norm.eps: getattr(self, eps))
            report.changed(_replace_class(modeling, cls, ours, row.name, attributes), name, name, ours.__name__)
    for name, glu in row.mlps.items():
        if not flags.get(row.mlp_flag):
            report.leave(name, f"{row.mlp_flag} is off")
        elif (cls := _modeling_class(modeling, name, report)) is not None:
            ours = glu.replacement.load()
            attributes = dict(forward=_guarded(cls, ours, glu.activation))
            report.changed(_replace_class(modeling, cls, ours, row.name, attributes), name, name, ours.__name__)
    for name, head in row.heads.items():
        cls = _modeling_class(modeling, name, report)
        if cls is None:
            continue
        if flags.get("fused_linear_cross_entropy"):
            report.changed(journal.set_shared(cls, "forward", head.load(), row.name), name, "forward", f"{head.file}.{head.function}")
        elif flags.get("cross_entropy"):
            new = journal.set_shared(cls, "_loss_function", _static_loss(), row.name)
            report.changed(new, name, "loss_function", "liger_causal_lm_loss")
        else:
            report.leave(name, "fused_linear_cross_entropy and cross_entropy are off")
    return _finish(report)


@functools.cache
def _static_loss():
    return staticmethod(_loss_function())


# --- back --------------------------------------------------------------------------------------------------------------------


def unpatch(target=None):
    """Takes patches back.

    Args:
        target: a model: its modules, loss and (unless others use it) rotation go back. A model type: its classes do. Models
            built while their classes were patched keep our modules. None: everything that the process shares.

    Returns:
        The :class:`Report`; what other code has replaced since is left and named.
    """
    if isinstance(target, str) and target not in by_type():
        raise ValueError(f"liger_kernel has no row for model type {target!r}; it has {', '.join(by_type())}")
    if target is None or isinstance(target, str):
        report = Report(target or "all classes")
        for restored in journal.restore_shared(target and by_type()[target].name):
            report.changed(True, restored, "ours", "the original")
        return _finish(report)
    report = Report(type(target).__name__)
    for name, module in target.named_modules():
        restored, left = journal.restore_module(module)
        if restored:
            report.changed(True, name or "model", "ours", "the original")
        for attribute in left:
            report.leave(f"{name}.{attribute}" if name else attribute, "replaced by other code since")
    for restored in journal.restore_shared(target):
        report.changed(True, restored, "ours", "the original")
    return _finish(report)


