"""Not an op: the names by which LIGER_KERNEL_IMPL asks for an implementation of the ops; see :mod:`.registry`."""

from liger_kernel.ops.backends.registry import IMPL_REGISTRY, LIGER_KERNEL_IMPL_ENV, ImplInfo, register_impl, select_impl

__all__ = ["IMPL_REGISTRY", "LIGER_KERNEL_IMPL_ENV", "ImplInfo", "register_impl", "select_impl"]
