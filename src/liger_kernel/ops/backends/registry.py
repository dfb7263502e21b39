"""The vocabulary of LIGER_KERNEL_IMPL, read once, when `liger_kernel.ops` is first imported.

There is one implementation a device, "cuda" and "cpu". The names of the reference package's implementations for NVIDIA GPUs are
accepted and mean the native one, so that configurations that set them keep working; any other name is an error. Programs ask which
one is loaded by looking for the `module_path` of each entry of `IMPL_REGISTRY` in `sys.modules`: the module of a name is imported
when the name is selected, and not otherwise."""

import dataclasses
import importlib
import logging
import os

LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"

NATIVE = ("cuda", "cpu")
# Names of the reference package -> the names under which its dispatcher knows them.
FULL_NAMES = {"triton": "nvidia-triton", "cutile": "nvidia-cutile", "cutedsl": "nvidia-cutedsl"}
ALIASES = frozenset({*FULL_NAMES, *FULL_NAMES.values(), "cute"})

IMPL_REGISTRY = {}  # name -> ImplInfo


@dataclasses.dataclass(frozen=True)
class ImplInfo:
    """An implementation that can be selected.

    Attributes:
        name: what LIGER_KERNEL_IMPL says.
        devices: device types that it runs on, e.g. ("cuda", "cpu").
        default_devices: those of them for which it is selected without being asked for.
        module_path: the module that is imported when it is selected.

    Raises:
        ValueError: no devices; no module_path; a default device that is not among the devices.
    """

    name: str
    devices: tuple
    default_devices: tuple = ()
    module_path: str = ""

    def __post_init__(self):
        if not self.devices:
            raise ValueError(f"ImplInfo {self.name!r}: devices is empty, expected device types such as ('cuda',)")
        if not self.module_path:
            raise ValueError(f"ImplInfo {self.name!r}: module_path is empty, expected the module to import")
        if not set(self.default_devices) <= set(self.devices):
            raise ValueError(f"ImplInfo {self.name!r}: default_devices {self.default_devices} are not all among devices {self.devices}")


def register_impl(info):
    """Adds an :class:`ImplInfo` to `IMPL_REGISTRY`; the same name again replaces it."""
    IMPL_REGISTRY[info.name] = info


for _name in ("cutile", "cutedsl", "cute"):
    register_impl(ImplInfo(_name, NATIVE, module_path=f"{__package__}.{_name}"))


def unknown(name):
    """The sentence that refuses a name."""
    known = sorted({*NATIVE, *ALIASES, *IMPL_REGISTRY})
    hint = " liger-kernel native has no kernels for Ascend NPUs." if "ascend" in name else ""
    return f"unknown implementation {name!r}, expected one of {', '.join(known)}; without a choice the tensors' device decides.{hint}"


def _registered(name):
    """The entry of a name or of its short form; None for the native names and those that have no entry. RuntimeError: unknown."""
    short = name.removeprefix("nvidia-") if name in ALIASES else name
    if short in IMPL_REGISTRY:
        return IMPL_REGISTRY[short]
    if name not in ALIASES and name not in NATIVE:
        raise RuntimeError(unknown(name))
    return None


def select_impl(device, explicit=None):
    """The entry for a device type ("cuda", "cpu", ...), or None for the native implementation.

    Args:
        device: a device type.
        explicit: the name asked for; None or "" leaves the choice to `default_devices`, first registered first.

    Raises:
        RuntimeError: the name is unknown, or its implementation does not run on the device.
    """
    name = (explicit or "").strip().lower()
    if not name:
        return next((info for info in IMPL_REGISTRY.values() if device in info.default_devices), None)
    info = _registered(name)
    devices = info.devices if info else (name,) if name in NATIVE else NATIVE
    if device not in devices:
        raise RuntimeError(f"implementation {name!r} runs on {' and '.join(devices)}, not on {device!r}; choose another or none")
    return info


def load_selected():
    """Checks LIGER_KERNEL_IMPL and imports the module of its name. Asks for no device, so that no CUDA context is made; whether the
    choice fits the tensors is judged at each call (:mod:`liger_kernel.backends`).

    Raises:
        RuntimeError: the name is unknown.
    """
    name = os.environ.get(LIGER_KERNEL_IMPL_ENV, "").strip().lower()
    if not name:
        return
    try:
        info = _registered(name)
    except RuntimeError as e:
        raise RuntimeError(f"{LIGER_KERNEL_IMPL_ENV}: {e}") from None
    if info is not None:
        importlib.import_module(info.module_path)
        logging.getLogger(__name__).debug("%s=%s means the native implementation", LIGER_KERNEL_IMPL_ENV, name)
