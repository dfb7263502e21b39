"""The feed-forward layer whole: what tiling must not change."""

from liger_kernel.ops.mlp.ref import eager, reference

__all__ = ["eager", "reference"]
