"""Patching Hugging Face models: `patch_model`, `patch_classes`, `unpatch`. The public apply_liger_kernel_to_* functions, in
`liger_kernel.transformers`, call these."""

_HOME = {"patch_model": "engine", "patch_classes": "engine", "unpatch": "engine", "Report": "report",
         "patch_unknown": "structure", "fuse_residual_norms": "residual"}


def __getattr__(name):
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'liger_kernel.patch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"liger_kernel.patch.{_HOME[name]}"), name)


def __dir__():
    return sorted(_HOME)
