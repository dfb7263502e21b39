"""Jensen-Shannon divergence."""

from liger_kernel.ops.jsd import LigerJSD, LigerJSDFunction

__all__ = ["LigerJSD", "LigerJSDFunction"]
