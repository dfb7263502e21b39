"""Squared ReLU."""

from liger_kernel.ops.relu_squared import LigerReLUSquared, LigerReLUSquaredFunction

__all__ = ["LigerReLUSquared", "LigerReLUSquaredFunction"]
