"""Sparsemax."""

from liger_kernel.ops.sparsemax import LigerSparsemax, LigerSparsemaxFunction

__all__ = ["LigerSparsemax", "LigerSparsemaxFunction"]
