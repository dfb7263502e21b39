"""Experts of mixtures."""

from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
from liger_kernel.ops.fused_moe.modules import LigerExperts

__all__ = ["LigerExperts", "LigerFusedMoEFunction"]
