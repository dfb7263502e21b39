"""The reference package's module of this name."""

from liger_kernel.ops.fused_linear_log_probs.scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

__all__ = ["LigerFusedLinearScaledCrossEntropyFunction"]
