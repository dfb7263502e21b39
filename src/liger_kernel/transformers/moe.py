"""Experts spread over ranks."""

from liger_kernel.ops.fused_moe.modules import LigerExpertParallelFusedMoe

__all__ = ["LigerExpertParallelFusedMoe"]
