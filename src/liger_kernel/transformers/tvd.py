"""Total variation distance."""

from liger_kernel.ops.tvd import LigerTVDLoss, LigerTVDLossFunction

__all__ = ["LigerTVDLoss", "LigerTVDLossFunction"]
