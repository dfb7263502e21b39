"""Jensen-Shannon divergence of two linear layers' outputs, without their logits."""

from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSD, LigerFusedLinearJSDFunction

__all__ = ["LigerFusedLinearJSD", "LigerFusedLinearJSDFunction"]
