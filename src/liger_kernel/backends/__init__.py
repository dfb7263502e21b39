"""Implementations of the ops by name: who registered one, which are usable, and which one a call gets.

Ours are "cuda" and "cpu", and the tensors' device chooses between them. What goes through here: :mod:`liger_kernel.functional`,
LigerLayerNorm (by its attributes `impl` and `mode` too), liger_rotary_pos_emb, LigerCrossEntropyLoss, LigerJSD, liger_jsd,
LigerJSDFunction, and the fused linear JSD and KL divergence as modules and functions. Everything else calls the native ops directly."""

import liger_kernel.backends.native  # registers the native ops
from liger_kernel.backends import registry
from liger_kernel.backends.dispatch import (
    ImplNotAvailableError,
    LigerImplFallbackWarning,
    NoImplAvailableError,
    all_impls,
    available_impls,
    clear_available_cache,
    dispatch,  # the function; the submodule of this name is found in sys.modules
    get_impl,
    resolve_impl,
    set_impl,
    third_party,
)
from liger_kernel.backends.registry import Capability, OpImpl, register_impl

# Older spellings.
register_op, resolve_backend = register_impl, resolve_impl
set_backend, get_backend = set_impl, get_impl
available_backends, all_backends = available_impls, all_impls
BackendNotAvailableError, NoBackendAvailableError, LigerBackendFallbackWarning = (
    ImplNotAvailableError, NoImplAvailableError, LigerImplFallbackWarning)
