"""Which implementation a call gets. In this order: the call's own `impl`, LIGER_KERNEL_IMPL_<OP>, LIGER_KERNEL_BACKEND_<OP>,
LIGER_KERNEL_IMPL, LIGER_KERNEL_BACKEND, :func:`set_impl`; then the usable one of lowest rank. A choice binds: what is not there, or
does not run on the tensors' device, raises. Nothing is copied to another device and nothing falls back to eager code. The environment
is read at every call; a compiled caller keeps the choice it was compiled with. What asks :func:`third_party` does so only while
`registry.choosing`: a variable that is set after the import, with nothing else registered or chosen, does not reach it."""

import functools
import logging
import os

import torch

from liger_kernel.backends import registry
from liger_kernel.ops.backends.registry import ALIASES, FULL_NAMES, NATIVE

_log = logging.getLogger(__name__)
# Variants of the reference package's kernels; ours choose by themselves.
_MODES = (None, "default", "standard", "static_persistent", "multi_wave_cached", "chunked")
_VARIABLES = ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_BACKEND")  # and these followed by _<OP>
_chosen = None
registry.choosing = any(name.startswith(_VARIABLES) and value.strip() for name, value in os.environ.items())


class ImplNotAvailableError(RuntimeError):
    """The implementation that was asked for is not registered for the op, or does not run on the tensors' device."""


class NoImplAvailableError(RuntimeError):
    """Nobody asked for an implementation, and none runs on the tensors' device."""


class LigerImplFallbackWarning(UserWarning):
    """For implementations that hand unsuitable inputs to another one. Ours never do."""


def set_impl(name):
    """Chooses an implementation for the whole process; None takes the choice back. The name is judged at the next call of each op.

    Raises:
        TypeError: `name` is neither a string nor None.
    """
    global _chosen
    if not isinstance(name, str | None):
        raise TypeError(f"set_impl: got {name!r}, expected the name of an implementation or None")
    _chosen = FULL_NAMES.get(name, name)
    registry.choosing = registry.choosing or name is not None


def get_impl():
    """What :func:`set_impl` was given, short forms written out ("cutile" is "nvidia-cutile"), or None."""
    return _chosen


def all_impls(op_name):
    """Names of all implementations of an op, usable or not, sorted."""
    return sorted(registry.implementations(op_name))


def available_impls(op_name, device=None):
    """Names of those that run on a device (a number, a name or a torch.device; None: on any that is there), the best first; [] for
    an op that nobody knows."""
    devices = [registry.as_device(device)] if device is not None else [*([registry.as_device(None)] * torch.cuda.is_available()), "cpu"]
    usable = [i.impl_name for d in devices for i in registry.list_registered(op_name) if i.capability.is_satisfied(d)]
    return list(dict.fromkeys(usable))


def clear_available_cache():
    """Does nothing: which implementations run where is asked anew each time."""


def _requested(op_name):
    """(name, where it was asked for) from the environment or :func:`set_impl`, or None."""
    for variable in (*(f"{name}_{op_name.upper()}" for name in _VARIABLES), *_VARIABLES):
        name = os.environ.get(variable, "").strip()
        if name:
            return name, variable
    return None if _chosen is None else (_chosen, "set_impl")


def resolve_impl(op_name, requested=None, device=None):
    """The :class:`OpImpl` that a call on `device` (None: the current one) gets.

    Names of the reference package's implementations for NVIDIA GPUs mean ours for that device, unless one is registered under the name.

    Raises:
        ImplNotAvailableError: what was asked for is not registered for the op, or does not run on the device.
        NoImplAvailableError: nothing was asked for, and nothing runs there.
    """
    device, known = registry.as_device(device), registry.implementations(op_name)
    name, source = (requested, "impl") if requested is not None else _requested(op_name) or (None, None)
    if name is None:
        for implementation in known.values():  # the preferred first
            if implementation.capability.is_satisfied(device):
                return implementation
        raise NoImplAvailableError(f"{op_name}: no implementation runs on {device.type}; registered: {_listed(known)}")
    full = name if name in known else FULL_NAMES.get(name.lower(), name.lower())
    if full not in known and full in ALIASES:
        native = "cuda" if device.type == "cuda" else "cpu"
        if native in known:
            if not torch.compiler.is_compiling():
                _log.debug("%s: %s=%s means %s", op_name, source, name, native)
            full = native
    if full not in known:
        raise ImplNotAvailableError(f"{op_name}: {source} asks for {name!r}; registered are {_listed(known)}")
    reason = known[full].capability.reason_if_unsatisfied(device)
    if reason:
        raise ImplNotAvailableError(
            f"{op_name}: {source} asks for {name!r}, which tensors on {device.type} cannot have: {reason}; move them, or leave the choice "
            "to their device")
    return known[full]


def _listed(known):
    return ", ".join(sorted(known)) or "none"


def dispatch(op_name, *args, impl=None, backend=None, **kwargs):
    """Calls the implementation that :func:`resolve_impl` finds for the tensors among `args`: the device of the first CUDA tensor, else
    of the first tensor. `backend` is an older name of `impl`. A `mode` of None is the implementation's default."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    device = next((t.device for t in tensors if t.is_cuda), tensors[0].device if tensors else None)
    chosen, how = _choose(op_name, device, impl if impl is not None else backend, kwargs.pop("mode", None))
    return chosen.call(*args, **kwargs, **how)


def _choose(op_name, device, impl, mode):
    """(the :class:`OpImpl`, its keywords)."""
    chosen = resolve_impl(op_name, impl, device)
    if chosen.impl_name in NATIVE:
        if mode not in _MODES:
            raise ValueError(f"{op_name}: mode is {mode!r}, expected None or one of {', '.join(map(repr, _MODES[1:]))}")
        return chosen, {}
    mode = chosen.default_mode if mode is None else mode
    return chosen, {} if mode is None else {"mode": mode}


def third_party(op_name, tensor, impl=None, mode=None):
    """The implementation that a call on `tensor` gets, as a function of what :mod:`liger_kernel.functional` passes on; None when it is
    ours, which the caller then runs in its own way. Raises as :func:`resolve_impl`, and ValueError for a mode that ours do not know."""
    chosen, how = _choose(op_name, tensor.device, impl, mode)
    return None if chosen.impl_name in NATIVE else functools.partial(chosen.call, **how)
