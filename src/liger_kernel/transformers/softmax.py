"""Softmax."""

from liger_kernel.ops.softmax import LigerSoftmax, LigerSoftmaxFunction

__all__ = ["LigerSoftmax", "LigerSoftmaxFunction"]
