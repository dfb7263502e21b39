"""The class that the reference package names in TRITON_CACHE_MANAGER, for programs that set the variable themselves."""

from liger_kernel.triton import apply_liger_triton_cache_manager

__all__ = ["apply_liger_triton_cache_manager"]


def __getattr__(name):
    if name != "LigerTritonFileCacheManager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from triton.runtime.cache import FileCacheManager
    except ImportError:
        raise AttributeError(f"{__name__}.{name} needs Triton, which is not installed: pip install triton") from None
    globals()[name] = type(name, (FileCacheManager,), {"__doc__": "Triton's own cache of files.", "__module__": __name__})
    return globals()[name]
