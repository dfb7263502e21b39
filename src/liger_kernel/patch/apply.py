"""The public functions made from the rows, and their dispatch by model type."""

import inspect
import logging

from liger_kernel.patch import engine
from liger_kernel.patch.models import by_type, rows

logger = logging.getLogger("liger_kernel")


def _parameter(name, default):
    if name.startswith("**"):
        return inspect.Parameter(name[2:], inspect.Parameter.VAR_KEYWORD)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


def _function(row):
    signature = inspect.Signature([_parameter(*parameter) for parameter in row.parameters])

    def apply(*args, **kwargs):
        flags = signature.bind(*args, **kwargs).arguments
        flags.update(flags.pop("kwargs", {}))
        model = flags.pop("model", None)
        if model is None:
            engine.patch_classes_by(row, **flags)
        else:
            engine.patch_model_by(row, model, **flags)

    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{row.name}"
    apply.__module__ = "liger_kernel.transformers.monkey_patch"
    apply.__signature__ = signature
    apply.__doc__ = (
        f"Replaces the layers and the loss of {row.name} models: {', '.join([*row.norms, *row.mlps, *row.ropes, *row.heads])}.\n\n"
        "With `model`, of that model alone (but for the rotation, a function that all models of the process share); without, of\n"
        "all models of this type in the process, built before or after. Each flag turns one kind of replacement off,\n"
        "or back if an earlier call had turned it on.\n"
        "`liger_kernel.patch` has the same with a report, and `unpatch`.\n\n"
        "Raises:\n    AssertionError: cross_entropy and fused_linear_cross_entropy both on."
    )
    if row.accepts:
        apply.__doc__ += f"\n    {row.rejects_with.__name__}: `model` is none of {', '.join(row.accepts)}."
    return apply


_BY_ROW = {name: _function(row) for name, row in rows().items()}

# model_type -> function. Read at call time, so that users may add or replace entries.
MODEL_TYPE_TO_APPLY_LIGER_FN = {key: _BY_ROW[row.name] for key, row in by_type().items()}

# The same by public name; a model type that shares another's row has a name too.
FUNCTIONS = {f"apply_liger_kernel_to_{key}": function for key, function in MODEL_TYPE_TO_APPLY_LIGER_FN.items()}


def kept_arguments(function, kwargs):
    """Those of `kwargs` that are parameters of `function`."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in parameters}


def apply_by_type(model_type, **kwargs):
    """Patches all models of a type in this process, before or after they are built; a type without an entry is logged and left.

    Args:
        model_type: `config.model_type`.
        **kwargs: flags of the type's function; other names are dropped.
    """
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is None:
        logger.info("liger_kernel: model type %r is not supported; nothing is patched", model_type)
        return
    kept = kept_arguments(function, kwargs)
    logger.info("liger_kernel: patching model type %r with %s", model_type, kept)
    function(**kept)


def apply_to_instance(model, **kwargs):
    """Patches one model; one whose type has no entry is logged and left.

    Args:
        model: a transformers model.
        **kwargs: flags of the type's function; other names are dropped.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is None:
        logger.info("liger_kernel: model type %r of %s is not supported; nothing is patched", model_type, type(model).__name__)
        return
    kept = kept_arguments(function, kwargs)
    logger.info("liger_kernel: patching %s with %s", type(model).__name__, kept)
    function(**{**kept, "model": model})
