"""What machine and which packages are there."""

import functools
import importlib.metadata
import importlib.util

import torch

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None

_NVIDIA_ARCH_BY_CC = {
    (7, 0): "volta_turing", (7, 5): "volta_turing", (8, 0): "ampere_ada", (8, 6): "ampere_ada", (8, 9): "ampere_ada", (9, 0): "hopper",
    (10, 0): "blackwell", (10, 3): "blackwell_ultra", (12, 0): "blackwell_consumer",
}
_AMD_ARCH_BY_GFX = {"gfx90a": "cdna2", "gfx94": "cdna3", "gfx95": "cdna4", "gfx10": "rdna2", "gfx11": "rdna3", "gfx12": "rdna4"}


def is_peft_available():
    """Whether PEFT is installed."""
    return PEFT_AVAILABLE


def is_npu_available():
    """transformers' check for an Ascend NPU; False where it cannot be made."""
    try:
        from transformers.utils import is_torch_npu_available
    except ImportError:
        return False
    return is_torch_npu_available()


def infer_device():
    """The first of "cuda", "npu" and "xpu" that is available, else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    return "xpu" if torch.xpu.is_available() else "cpu"


def infer_comm_backend():
    """The name of torch.distributed's backend for this machine. RuntimeError when there is none."""
    from torch import distributed

    if torch.cuda.is_available() and distributed.is_nccl_available():
        return "nccl"
    if is_npu_available():
        return "ascend"
    if torch.xpu.is_available() and distributed.is_xccl_available():
        return "xccl"
    for name, available in (("mpi", distributed.is_mpi_available), ("gloo", distributed.is_gloo_available)):
        if available():
            return name
    raise RuntimeError("torch.distributed has no usable communication backend")


def _infer_nvidia_arch(device_id):
    capability = torch.cuda.get_device_capability(device_id)
    return _NVIDIA_ARCH_BY_CC.get(tuple(capability), "sm_{}{}".format(*capability))


def _infer_amd_arch(device_id):
    gfx = torch.cuda.get_device_properties(device_id).gcnArchName.split(":")[0]
    return next((arch for prefix, arch in _AMD_ARCH_BY_GFX.items() if gfx.startswith(prefix)), gfx)


def _infer_xpu_arch(device_id):
    return torch.xpu.get_device_properties(device_id).name


def _infer_npu_arch(device_id):
    return torch.npu.get_device_name(device_id)


@functools.cache
def infer_device_arch(device_id=0):
    """The architecture of a device of `infer_device()`'s kind, e.g. "hopper"; "cpu" on the CPU, the kind when it cannot be told."""
    device = infer_device()
    if device == "cpu":
        return "cpu"
    find = {"cuda": _infer_amd_arch if torch.version.hip else _infer_nvidia_arch, "xpu": _infer_xpu_arch, "npu": _infer_npu_arch}[device]
    try:
        return find(device_id)
    except Exception:  # noqa: BLE001, whatever a driver raises: the kind is then all that is known
        return device


def transformers_version_dispatch(
    required_version, before_fn, after_fn, before_args=(), after_args=(), before_kwargs=None, after_kwargs=None
):
    """`after_fn` called with its arguments when the installed transformers is at least `required_version`, else `before_fn`."""
    from packaging.version import Version

    if Version(importlib.metadata.version("transformers")) >= Version(required_version):
        return after_fn(*after_args, **(after_kwargs or {}))
    return before_fn(*before_args, **(before_kwargs or {}))


def get_total_gpu_memory():
    """Memory of device 0 in whole GiB. RuntimeError without an accelerator."""
    device = infer_device()
    if device == "cpu":
        raise RuntimeError("get_total_gpu_memory: no accelerator is available")
    return getattr(torch, device).get_device_properties(0).total_memory // 1024**3
