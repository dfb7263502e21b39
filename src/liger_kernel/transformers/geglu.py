"""Gated GELU MLP modules."""

from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.geglu.modules import LigerGEGLUMLP, LigerGEGLUMLPForGemma4

__all__ = ["LigerGEGLUMLP", "LigerGEGLUMLPForGemma4", "LigerGELUMulFunction"]
