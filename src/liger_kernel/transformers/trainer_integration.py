"""The import path of early trainers."""

from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

__all__ = ["_apply_liger_kernel"]
