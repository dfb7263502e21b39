"""Helpers that other packages' kernels import from here."""

import contextlib
import functools
import importlib.metadata
import operator as _operator

import torch

from liger_kernel.utils import infer_device

_COMPARISONS = {">": _operator.gt, ">=": _operator.ge, "<": _operator.lt, "<=": _operator.le, "==": _operator.eq, "!=": _operator.ne}
_MAX_BLOCK = 65536


def is_hip():
    """Whether torch was built for AMD GPUs."""
    return torch.version.hip is not None


def device_context(device):
    """A context in which `device` is current; none is needed on the CPU."""
    device = torch.device(device)
    module = getattr(torch, device.type, None)
    return module.device(device) if device.type != "cpu" and hasattr(module, "device") else contextlib.nullcontext()


def ensure_contiguous(fn):
    """Decorates `fn(ctx, *args, **kwargs)`: tensors arrive contiguous."""

    @functools.wraps(fn)
    def wrapper(ctx, *args, **kwargs):
        def contiguous(value):
            return value.contiguous() if isinstance(value, torch.Tensor) else value

        return fn(ctx, *map(contiguous, args), **{name: contiguous(value) for name, value in kwargs.items()})

    return wrapper


def calculate_settings(n):
    """(block size, warps) for a Triton kernel with one row of `n` columns a program: the next power of two, and 4 to 32 warps.

    Raises:
        RuntimeError: the block would exceed 65536 columns.
    """
    block = 1 << max(n - 1, 0).bit_length()
    if block > _MAX_BLOCK:
        raise RuntimeError(f"calculate_settings: {n} columns need a block of {block}, the largest is {_MAX_BLOCK}")
    return block, 32 if block >= 32768 else 16 if block >= 8192 else 8 if block >= 2048 else 4


def compare_version(package, operator, target):
    """`installed version of package <operator> target`, where `operator` is a function of two versions (operator.ge) or its sign;
    False when the package is missing."""
    from packaging.version import Version

    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return _COMPARISONS.get(operator, operator)(Version(installed), Version(target))


def get_amp_custom_fwd_bwd():
    """torch.amp's decorators for autograd functions, for this machine's kind of device."""
    device = infer_device()
    return functools.partial(torch.amp.custom_fwd, device_type=device), functools.partial(torch.amp.custom_bwd, device_type=device)


def get_npu_core_count(default=20):
    """Vector cores of the current Ascend NPU, or `default` when there is none."""
    try:
        return torch.npu.get_device_properties(torch.npu.current_device()).vector_core_num
    except (AttributeError, RuntimeError):
        return default


def set_large_grf_mode(kernel_args):
    """Asks Triton for Intel GPUs' large register files, in the keyword arguments of a kernel launch."""
    kernel_args["grf_mode"] = "256"


def _triton_dtypes():
    try:
        import triton.language as tl
    except ImportError:
        return {}
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def __getattr__(name):
    """Names that need a device query or Triton, made on first use so that importing this module touches neither."""
    if name == "torch_to_triton_dtype":
        globals()[name] = _triton_dtypes()
    elif name in ("amp_custom_fwd", "amp_custom_bwd"):
        globals()["amp_custom_fwd"], globals()["amp_custom_bwd"] = get_amp_custom_fwd_bwd()
    else:
        raise AttributeError(f"module 'liger_kernel.ops.utils' has no attribute {name!r}")
    return globals()[name]
