"""Gated SiLU MLP modules."""

from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from liger_kernel.ops.swiglu.modules import (
    LigerBlockSparseTop2MLP,
    LigerFalconH1SwiGLUMLP,
    LigerHunyuanV1SwiGLUMLP,
    LigerPhi3SwiGLUMLP,
    LigerQwen3MoeSwiGLUMLP,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,
)

__all__ = [
    "LigerBlockSparseTop2MLP", "LigerFalconH1SwiGLUMLP", "LigerHunyuanV1SwiGLUMLP", "LigerPhi3SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP",
    "LigerSiLUMulFunction", "LigerSwiGLUMLP", "LigerSwiGLUMLPForMuseGlimmer",
]
