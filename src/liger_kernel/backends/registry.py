"""Which implementations of an op there are. Ours are "cuda" and "cpu"; others may register more."""

import dataclasses
import importlib
import importlib.util
import inspect
import traceback

import torch

from liger_kernel.ops.backends.registry import NATIVE

# Whether anything but the tensors' device may choose: another implementation was registered, or a choice was made (:func:`set_impl`, or
# the environment at import). While it is False, modules and functions of ours that can be chosen for do not ask.
choosing = False

_IMPLS = {}  # op -> {implementation: OpImpl}, by rank and then by name
_LOCATIONS = {}  # op -> modules that register implementations of it
_FAILURES = {}  # module -> what importing it raised


def as_device(device):
    """`device` as torch.device: a number is a CUDA device, None the current one (CUDA where there is one)."""
    if isinstance(device, torch.device):
        return device
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


@dataclasses.dataclass(frozen=True)
class Capability:
    """What an implementation needs.

    Attributes:
        min_cc, max_cc: lowest and highest compute capability, (major, minor), inclusive.
        modules: packages that must be installed.
        requires_cuda: whether it needs a CUDA device; compute capabilities imply it.
        predicate: a function of the device (or of nothing) that says whether it runs there.
    """

    min_cc: tuple | None = None
    max_cc: tuple | None = None
    modules: tuple | list = dataclasses.field(default_factory=list)
    requires_cuda: bool = False
    predicate: object = None

    def __post_init__(self):
        asks = self.predicate is not None and bool(inspect.signature(self.predicate).parameters)
        object.__setattr__(self, "_predicate_asks_device", asks)

    def is_satisfied(self, device=None):
        """Whether the device (None: the current one) will do."""
        return self.reason_if_unsatisfied(device) is None

    def reason_if_unsatisfied(self, device=None):
        """Why not, or None."""
        device = as_device(device)
        if self.requires_cuda or self.min_cc or self.max_cc:
            if device.type != "cuda":
                return f"it needs CUDA, not {device.type}"
        if self.min_cc or self.max_cc:
            capability = torch.cuda.get_device_capability(device)
            if self.min_cc and capability < tuple(self.min_cc) or self.max_cc and capability > tuple(self.max_cc):
                return f"compute capability {capability} is not within {self.min_cc} to {self.max_cc}"
        missing = [name for name in self.modules if not _is_installed(name)]
        if missing:
            return f"it needs {', '.join(missing)}"
        try:
            runs = self.predicate is None or (self.predicate(device) if self._predicate_asks_device else self.predicate())
        except Exception as error:  # noqa: BLE001 - somebody else's code, which must not take down every call of the op
            return f"its predicate raised {error!r}"
        return None if runs else f"it does not run on {device.type}"


def _is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it lies in
        return False


@dataclasses.dataclass(frozen=True)
class OpImpl:
    """One implementation of one op, as :func:`register_impl` got it."""

    op_name: str
    impl_name: str
    capability: Capability
    forward: object
    autograd_function: type | None = None
    modes: tuple = ()
    default_mode: str | None = None
    preference_rank: int = 100
    tolerances: dict | None = None
    notes: str = ""

    @property
    def backend(self):
        """An older name of `impl_name`."""
        return self.impl_name

    def call(self, *args, **kwargs):
        """Runs it. An autograd.Function knows no keywords: `mode` is left out, any other is a TypeError."""
        if self.autograd_function is None:
            return self.forward(*args, **kwargs)
        kwargs.pop("mode", None)
        if kwargs:
            raise TypeError(f"{self.op_name}: the implementation {self.impl_name!r} takes no keywords, got {', '.join(kwargs)}")
        return self.autograd_function.apply(*args)


def register_impl(op_name, *, impl_name=None, capability=None, modes=(), default_mode=None, preference_rank=100, tolerances=None,
                  notes="", backend=None):
    """Decorates a function, or a subclass of torch.autograd.Function, that implements an op; returns it as it is.

    It is used where its name is asked for, and unasked where its capability holds and no other usable one has a lower
    `preference_rank` (ours have 50). It gets what :mod:`liger_kernel.functional` was called with, by position, and the keyword `mode`
    if there is one.

    Args:
        op_name: e.g. "rms_norm".
        impl_name: e.g. "vendor-language"; the same again replaces. `backend` is an older name of this parameter.
        capability: a :class:`Capability`; None needs nothing.
        modes, default_mode: names of its variants, and the one used unasked.
        tolerances: {dtype: (forward, backward)} for :func:`liger_kernel.testing.assert_op_correctness`.

    Raises:
        TypeError: no name; what is decorated is neither a class nor callable.
    """
    name = impl_name or backend
    if not name:
        raise TypeError(f"register_impl({op_name!r}): impl_name is missing")

    def decorate(implementation):
        global choosing
        if not callable(implementation):
            raise TypeError(f"register_impl({op_name!r}, impl_name={name!r}): got {implementation!r}, expected a function or a class")
        cls = implementation if isinstance(implementation, type) else None
        forward = implementation if cls is None else cls.apply
        impls = {**_IMPLS.get(op_name, {}), name: OpImpl(
            op_name, name, capability or Capability(), forward, cls, tuple(modes), default_mode, preference_rank, tolerances, notes)}
        _IMPLS[op_name] = dict(sorted(impls.items(), key=lambda item: (item[1].preference_rank, item[0])))
        choosing = choosing or name not in NATIVE
        return implementation

    return decorate


def declare_op_locations(op_name, module_paths):
    """Modules that register implementations of an op; imported when the op is first asked about."""
    global choosing
    choosing = True
    _LOCATIONS.setdefault(op_name, []).extend([module_paths] if isinstance(module_paths, str) else module_paths)


def _discover(op_name):
    for path in _LOCATIONS.pop(op_name, ()):
        try:
            importlib.import_module(path)
        except Exception:  # noqa: BLE001, whatever it raises: this implementation is then not there
            _FAILURES[path] = traceback.format_exc()


def implementations(op_name):
    """{name: OpImpl} of an op, the preferred first; {} for one that nobody knows."""
    if op_name in _LOCATIONS:
        _discover(op_name)
    return _IMPLS.get(op_name, {})


def get_registered(op_name, backend):
    """The :class:`OpImpl` of that name, or None."""
    return implementations(op_name).get(backend)


def list_registered(op_name):
    """Every :class:`OpImpl` of an op, the preferred first."""
    return list(implementations(op_name).values())


def all_registered_ops():
    """Names of all ops that have an implementation."""
    for op_name in list(_LOCATIONS):
        _discover(op_name)
    return sorted(_IMPLS)


def get_discovery_failures():
    """{module: traceback} of the declared modules that could not be imported."""
    return dict(_FAILURES)
