"""Loads the native library (`_C`), which registers the `torch.ops.liger_kernel` operators, and its plain C entry points.

`LIGER_KERNEL_LIBRARY` names another build of the library to load instead of the installed one.
"""

import ctypes
import importlib.util
import os

import torch


def _find():
    path = os.environ.get("LIGER_KERNEL_LIBRARY")
    if path:
        return path
    spec = importlib.util.find_spec("liger_kernel._C")
    if spec is None or not spec.origin:
        raise ImportError(
            "liger_kernel's native library _C is missing: the package was not built. "
            "Run `pip install --no-build-isolation .` in the source tree, or reinstall the wheel."
        )
    return spec.origin


PATH = _find()
torch.ops.load_library(PATH)
ops = torch.ops.liger_kernel

_library = ctypes.CDLL(PATH)
_library.liger_ops.restype = _library.liger_machine.restype = _library.liger_explain.restype = ctypes.c_int64


def _text(call):
    """Calls a C function that fills a text buffer, again with a larger one when it was too small."""
    size = 1 << 14
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = call(buffer, ctypes.c_int64(size))
        needed = length if length >= 0 else -length - 1
        if needed < size:
            break
        size = needed + 1
    if length < 0:
        raise ValueError(buffer.value.decode())
    return buffer.value.decode()


def list_ops():
    """[(op name, how `explain` reads a shape, [variant names])] of this build."""
    rows = [line.split("\t") for line in _text(_library.liger_ops).splitlines()]
    return [(name, shape, list(dict.fromkeys(variants.split()))) for name, shape, variants in rows]


def machine(device=-1):
    """The machine as the kernels see it: CUDA device index, or -1 for the CPU. ValueError when there is none."""
    return _text(lambda out, size: _library.liger_machine(device, out, size))


def explain(op, shape, dtype, device=-1):
    """[(pass, variant, "chosen" | "able" | "refused", reason)] and the plan as text."""
    array = (ctypes.c_int64 * len(shape))(*shape)
    text = _text(lambda out, size: _library.liger_explain(op.encode(), array, len(shape), dtype.encode(), device, out, size))
    lines = [line.split("\t") for line in text.splitlines()]
    return [tuple(line) for line in lines if len(line) == 4], "\n".join(line[1] for line in lines if line[0] == "plan")
