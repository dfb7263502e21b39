"""Fused kernels for LLM training: C++20 and CUDA, for CPUs and GPUs, adopted with one line."""

from liger_kernel._version import __version__

__all__ = ["__version__"]
