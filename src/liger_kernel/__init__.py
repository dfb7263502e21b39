"""Fused kernels for LLM training: C++20 and CUDA, for CPUs and GPUs, adopted with one line."""

from liger_kernel._version import __version__

__all__ = ["__version__", "available_backends", "available_impls", "get_backend", "get_impl", "set_backend", "set_impl"]


def __getattr__(name):
    if name not in __all__:  # the rest of them are names of liger_kernel.backends
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from liger_kernel import backends

    return getattr(backends, name)
