"""Group normalisation."""

from liger_kernel.ops.group_norm import LigerGroupNorm, LigerGroupNormFunction

__all__ = ["LigerGroupNorm", "LigerGroupNormFunction"]
