"""Feed-forward layers over pieces of the sequence."""

from liger_kernel.ops.tiled_mlp import LigerTiledMLPFunction, apply_tiled_mlp
from liger_kernel.ops.tiled_mlp.modules import LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP

__all__ = ["LigerTiledGEGLUMLP", "LigerTiledMLPFunction", "LigerTiledSwiGLUMLP", "apply_tiled_mlp"]
