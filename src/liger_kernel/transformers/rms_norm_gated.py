"""RMSNorm with a gate."""

from liger_kernel.ops.rms_norm_gated import LigerRMSNormGated, LigerRMSNormGatedFunction

__all__ = ["LigerRMSNormGated", "LigerRMSNormGatedFunction"]
