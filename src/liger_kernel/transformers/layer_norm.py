"""LayerNorm."""

from liger_kernel.ops.layer_norm import LigerLayerNorm, LigerLayerNormFunction

__all__ = ["LigerLayerNorm", "LigerLayerNormFunction"]
