"""Patching functions under the names that trainers import. The work is in `liger_kernel.patch`."""

import importlib.metadata

from packaging.version import Version

MIN_SUPPORTED_TRANSFORMERS_VERSION = "4.52.0"

try:
    _transformers = Version(importlib.metadata.version("transformers"))
except importlib.metadata.PackageNotFoundError:
    raise ImportError(f"liger_kernel.transformers.monkey_patch needs transformers >= {MIN_SUPPORTED_TRANSFORMERS_VERSION}") from None
if _transformers < Version(MIN_SUPPORTED_TRANSFORMERS_VERSION):
    raise ImportError(
        f"liger_kernel.transformers.monkey_patch needs transformers >= {MIN_SUPPORTED_TRANSFORMERS_VERSION}, {_transformers} is installed"
    )

from liger_kernel.patch.apply import (  # noqa: E402
    FUNCTIONS,
    MODEL_TYPE_TO_APPLY_LIGER_FN,
    kept_arguments,
    logger,
)
from liger_kernel.patch.apply import apply_by_type as _apply_liger_kernel  # noqa: E402
from liger_kernel.patch.apply import apply_to_instance as _apply_liger_kernel_to_instance  # noqa: E402
from liger_kernel.patch.modules import bind_method as _bind_method_to_module  # noqa: E402
from liger_kernel.patch.modules import patch_geglu_module as _patch_geglu_module  # noqa: E402
from liger_kernel.patch.modules import patch_glu_module as _patch_swiglu_module  # noqa: E402
from liger_kernel.patch.modules import patch_layer_norm_module as _patch_layer_norm_module  # noqa: E402
from liger_kernel.patch.modules import patch_rms_norm_module as _patch_rms_norm_module  # noqa: E402
from liger_kernel.patch.residual import fuse_residual_norms  # noqa: E402
from liger_kernel.utils import PEFT_AVAILABLE  # noqa: E402

IS_TRANSFORMERS_V5_OR_LATER = _transformers.major >= 5

globals().update(FUNCTIONS)

__all__ = [
    "IS_TRANSFORMERS_V5_OR_LATER", "MIN_SUPPORTED_TRANSFORMERS_VERSION", "MODEL_TYPE_TO_APPLY_LIGER_FN", "PEFT_AVAILABLE",
    "_apply_liger_kernel", "_apply_liger_kernel_to_instance", "_bind_method_to_module", "_patch_geglu_module", "_patch_layer_norm_module",
    "_patch_rms_norm_module", "_patch_swiglu_module", "fuse_residual_norms", "kept_arguments",
    "logger",
]
__all__.extend(FUNCTIONS)
