"""Fused linear cross entropy modules."""

from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction, LigerFusedLinearCrossEntropyLoss

__all__ = ["LigerFusedLinearCrossEntropyFunction", "LigerFusedLinearCrossEntropyLoss"]
