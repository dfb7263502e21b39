"""Cross entropy modules."""

from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction, LigerCrossEntropyLoss

__all__ = ["LigerCrossEntropyFunction", "LigerCrossEntropyLoss"]
