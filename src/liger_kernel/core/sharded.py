"""DTensors through an elementwise op: the op works on local shards, its result carries the same placements."""

import torch


class Layout:
    """Mesh, placements and global shape of the first DTensor among an op's operands, which all of them are brought to.

    A pending sum (Partial) is made Replicate first: an activation of partial sums is not a partial sum of activations.
    """

    def __init__(self, like, whole_rows=False):
        from torch.distributed.tensor import Replicate

        def keep(p):
            return not p.is_partial() and not (whole_rows and p.is_shard(like.ndim - 1))

        self.mesh = like.device_mesh
        self.placements = tuple(p if keep(p) else Replicate() for p in like.placements)
        self.shape = like.shape

    @classmethod
    def of(cls, *tensors, whole_rows=False):
        """The layout of the first DTensor, with its last dimension on one rank if `whole_rows`; None for plain tensors."""
        first = next((t for t in tensors if hasattr(t, "to_local")), None)
        return None if first is None else cls(first, whole_rows)

    def local(self, t):
        """This rank's shard of `t`; a plain tensor counts as held whole by every rank."""
        from torch.distributed.tensor import DTensor, Replicate

        if not hasattr(t, "to_local"):
            t = DTensor.from_local(t, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return t.redistribute(self.mesh, self.placements).to_local()

    def wrap(self, local, columns=None):
        """The DTensor whose shard on this rank is `local`; it has the layout's shape, or `columns` in the last dimension."""
        from torch.distributed.tensor import DTensor

        shape = self.shape if columns is None else torch.Size((*self.shape[:-1], columns))
        stride = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            stride[i - 1] = stride[i] * shape[i]
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=tuple(stride))

    def gradient(self, local, was_plain):
        """The gradient of an operand from this rank's shard of it: whole again where the operand was a plain tensor."""
        if local is None:
            return None
        gradient = self.wrap(local)
        return gradient.full_tensor() if was_plain else gradient
