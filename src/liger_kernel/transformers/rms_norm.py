"""RMSNorm modules."""

from liger_kernel.ops.rms_norm import LigerRMSNorm
from liger_kernel.ops.rms_norm.modules import (
    LigerRMSNormForGemma,
    LigerRMSNormForGemma2,
    LigerRMSNormForGemma3,
    LigerRMSNormForGemma4,
    LigerRMSNormForGlm4,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
    LigerRMSNormForOlmo2,
    LigerRMSNormForQwen3Next,
)

__all__ = [
    "LigerRMSNorm", "LigerRMSNormForGemma", "LigerRMSNormForGemma2", "LigerRMSNormForGemma3", "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4", "LigerRMSNormForMuseGlimmer", "LigerRMSNormForMuseGlimmerTextCentered", "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
]
