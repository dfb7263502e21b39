"""Polynomial normalisation."""

from liger_kernel.ops.poly_norm import LigerPolyNorm, LigerPolyNormFunction

__all__ = ["LigerPolyNorm", "LigerPolyNormFunction"]
