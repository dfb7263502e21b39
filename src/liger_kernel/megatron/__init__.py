"""Kernels for Megatron-LM: modules with Megatron's signatures, and a function that puts them in place. Importing this package needs no
megatron-core; only :func:`apply_liger_kernel_to_megatron` does."""

from liger_kernel.megatron.modules import LigerMegatronCrossEntropy, LigerMegatronRMSNorm, LigerMegatronSwiGLU
from liger_kernel.megatron.monkey_patch import apply_liger_kernel_to_megatron

__all__ = ["LigerMegatronCrossEntropy", "LigerMegatronRMSNorm", "LigerMegatronSwiGLU", "apply_liger_kernel_to_megatron"]
