"""DTensors through an op whose elements, or rows, do not depend on each other: it works on local shards, and its result carries
the same placements."""

import torch

from liger_kernel.core.tensors import gather_dtensor


def on_shards(function, tensors, parameters=(), options=(), whole=(-1,)):
    """`function(*tensors, *parameters, *options)`, of this rank's part where there are DTensors.

    Args:
        tensors: of one shape. The first DTensor among them decides how all lie, except that no rank's part is cut along the
            dimensions `whole`: the last one for an op whose rows do not depend on each other, none for an elementwise op.
        parameters: what all parts read: plain tensors, DTensors (taken whole) or None. Their gradients are summed over the ranks
            that hold different parts.

    Returns:
        What `function` returns, one tensor of that shape or several: DTensors where one of `tensors` is one, plain otherwise.
    """
    for t in (*tensors, *parameters):
        if hasattr(t, "to_local"):
            break
    else:
        return function(*tensors, *parameters, *options)
    layout = Layout.of(*tensors, whole=[d % tensors[0].ndim for d in whole])
    parameters = map(gather_dtensor, parameters)
    if layout is None:
        return function(*tensors, *parameters, *options)
    result = function(*map(layout.local, tensors), *map(layout.parameter, parameters), *options)
    return tuple(map(layout.wrap, result)) if isinstance(result, tuple) else layout.wrap(result)


def as_module_takes(module, x):
    """`x` as the forward of `module` would get it, for callers that read its weight instead: a plan of torch's tensor parallelism may
    have hooked the module to take its argument for a shard, and to gather it."""
    for hook in module._forward_pre_hooks.values():
        if getattr(hook, "__module__", "").startswith("torch.distributed.tensor"):
            changed = hook(module, (x,))
            x = x if changed is None else changed[0] if isinstance(changed, tuple) else changed
    return x


class Layout:
    """Mesh, placements and global shape of the first DTensor among an op's operands, which all of them are brought to.

    A pending sum (Partial) is made Replicate first: an activation of partial sums is not a partial sum of activations.
    """

    def __init__(self, like, whole=()):
        from torch.distributed.tensor import Replicate

        def keep(p):
            return not p.is_partial() and not any(p.is_shard(d) for d in whole)

        self.mesh = like.device_mesh
        self.placements = tuple(p if keep(p) else Replicate() for p in like.placements)
        self.shape = like.shape

    @classmethod
    def of(cls, *tensors, whole=()):
        """The layout of the first DTensor, with the dimensions `whole` on every rank; None for plain tensors."""
        for t in tensors:
            if hasattr(t, "to_local"):
                return cls(t, whole)
        return None

    def local(self, t):
        """This rank's shard of `t`; a plain tensor counts as held whole by every rank."""
        from torch.distributed.tensor import DTensor, Replicate

        if not hasattr(t, "to_local"):
            t = DTensor.from_local(t, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return t.redistribute(self.mesh, self.placements).to_local()

    def parameter(self, t):
        """The plain tensor `t`, which all ranks hold; where they use it on different shards, its gradient is the sum of theirs."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if t is None:
            return None
        spread = [Partial() if p.is_shard() else p for p in self.placements]
        whole = DTensor.from_local(t, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return whole.to_local(grad_placements=spread)

    def wrap(self, local, columns=None):
        """The DTensor whose shard on this rank is `local`; it has the layout's shape, or `columns` in the last dimension, and the
        order of dimensions in memory that `local` has."""
        from torch.distributed.tensor import DTensor

        shape = self.shape if columns is None else torch.Size((*self.shape[:-1], columns))
        stride, step = [1] * len(shape), 1
        for d in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
            stride[d], step = step, step * shape[d]
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, shape=shape, stride=tuple(stride))

    def gradient(self, local, was_plain):
        """The gradient of an operand from this rank's shard of it: whole again where the operand was a plain tensor."""
        if local is None:
            return None
        gradient = self.wrap(local)
        return gradient.full_tensor() if was_plain else gradient
