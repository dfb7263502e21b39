"""Feed-forward layers as one autograd node."""

from liger_kernel.ops.mlp import LigerMLPFunction
from liger_kernel.ops.mlp.modules import LigerFalconH1MLP, LigerMLP

__all__ = ["LigerFalconH1MLP", "LigerMLP", "LigerMLPFunction"]
