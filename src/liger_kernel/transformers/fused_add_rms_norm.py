"""Residual addition with RMSNorm."""

from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNorm, LigerFusedAddRMSNormFunction

__all__ = ["LigerFusedAddRMSNorm", "LigerFusedAddRMSNormFunction"]
