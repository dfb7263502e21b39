"""KL divergence."""

from liger_kernel.ops.kl_div import LigerKLDIVLoss, LigerKLDivLossFunction

__all__ = ["LigerKLDIVLoss", "LigerKLDivLossFunction"]
