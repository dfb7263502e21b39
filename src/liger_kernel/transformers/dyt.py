"""Dynamic Tanh."""

from liger_kernel.ops.dyt import LigerDyT, LigerDyTFunction

__all__ = ["LigerDyT", "LigerDyTFunction"]
