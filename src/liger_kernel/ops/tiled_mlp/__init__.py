"""A feed-forward layer run piece by piece over the sequence, so that its activations exist for one piece at a time."""

import contextlib
import math

import torch
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from liger_kernel.core.autograd import first_derivative_only

EXPORTS = ["LigerTiledMLPFunction", "apply_tiled_mlp"]

_OP = "tiled_mlp"


class _Surroundings:
    """What a piece's forward depends on beside its arguments, to be the same in backward: random numbers and autocast."""

    def __init__(self, x):
        kinds = {"cpu", x.device.type} - {"meta"}
        self.cpu_state, self.devices, self.states = torch.get_rng_state(), [], []
        if len(kinds) > 1:
            self.devices, self.states = get_device_states(x)
        self.kind = x.device.type if self.devices else "cuda"
        self.autocast = [dict(device_type=kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
                         for kind in kinds]

    @contextlib.contextmanager
    def again(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self.devices, device_type=self.kind))
            torch.set_rng_state(self.cpu_state)
            set_device_states(self.devices, self.states, device_type=self.kind)
            for options in self.autocast:
                stack.enter_context(torch.autocast(**options))
            yield


@contextlib.contextmanager
def _aliases(module, parameters):
    """Puts tensors of the parameters' memory in their places, and yields them: the parameters' own hooks are for their whole gradients.

    A parameter that `module` does not hold as one stays itself."""
    alias = {id(p): p.detach().requires_grad_() for p in parameters}
    places = [(m._parameters, name, p) for m in module.modules() for name, p in m._parameters.items() if id(p) in alias]
    held = {id(p) for _, _, p in places}
    try:
        for owner, name, p in places:
            owner[name] = alias[id(p)]
        yield [alias[id(p)] if id(p) in held else p for p in parameters]
    finally:
        for owner, name, p in places:
            owner[name] = p


def _piece(fn, module, x):
    y = fn(module, x)
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"{_OP}: fn returned {type(y).__name__}, expected one tensor")
    if y.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"{_OP}: fn made {tuple(y.shape)} of {tuple(x.shape)}; all dimensions but the last must stay")
    return y


def _joined(pieces):
    """The pieces, an iterator, along the second-to-last dimension: of one piece itself, else each is copied to its place and let go."""
    (size, first), whole, begin = next(pieces), None, 0
    if first.shape[-2] == size:
        return first
    whole = first.new_empty((*first.shape[:-2], size, first.shape[-1]))
    while first is not None:
        whole.narrow(-2, begin, first.shape[-2]).copy_(first)
        begin += first.shape[-2]
        first = next(pieces, (size, None))[1]
    return whole


def _addend(g, more):
    """A piece's gradient, of its own memory where `more` are added to it, and in fp32: a sum in 16 bits would round once a piece."""
    return g.to(torch.promote_types(g.dtype, torch.float32), copy=True) if more else g


class LigerTiledMLPFunction(torch.autograd.Function):
    """`apply(fn, mlp_module, x, shards, compute_params=None)`; see :func:`apply_tiled_mlp`.

    Saves x and the parameters. The parameters are inputs of the node, so that each gets its whole gradient, once a backward.
    """

    @classmethod
    def apply(cls, fn, mlp_module, x, shards, compute_params=None):
        given = [p for p in (mlp_module.parameters() if compute_params is None else compute_params) if p.requires_grad]
        if any(hasattr(p, "ds_id") for p in given):
            raise RuntimeError(f"{_OP}: parameters that DeepSpeed ZeRO-3 has partitioned are not supported; use gradient checkpointing, or "
                               "DeepSpeed's own TiledMLP")
        return super().apply(fn, mlp_module, x, shards, *given)

    @staticmethod
    def forward(ctx, fn, mlp_module, x, shards, *parameters):
        ctx.fn, ctx.module, ctx.shards = fn, mlp_module, shards
        ctx.surroundings = _Surroundings(x)
        ctx.save_for_backward(x, *parameters)
        return _joined((x.shape[-2], _piece(fn, mlp_module, part)) for part in x.chunk(shards, -2))

    @staticmethod
    @first_derivative_only(_OP)
    def backward(ctx, dy):
        x, *parameters = ctx.saved_tensors
        want_x, wanted = ctx.needs_input_grad[2], [p for p, needs in zip(parameters, ctx.needs_input_grad[4:], strict=True) if needs]
        sums, result = [None] * len(wanted), None

        def pieces(wanted):
            begin = 0
            for part in x.chunk(ctx.shards, -2):
                upstream = dy.narrow(-2, begin, part.shape[-2])
                begin += part.shape[-2]
                part = part.detach().requires_grad_(want_x)
                with torch.enable_grad():
                    y = _piece(ctx.fn, ctx.module, part)
                dx, asked = None, [part] * want_x + wanted
                found = torch.autograd.grad(y, asked, upstream, allow_unused=True) if y.requires_grad else [None] * len(asked)
                if want_x:
                    dx, *found = found
                for i, g in enumerate(found):
                    if g is not None:
                        sums[i] = _addend(g, part.shape[-2] < x.shape[-2]) if sums[i] is None else sums[i].add_(g)
                yield x.shape[-2], torch.zeros_like(part) if want_x and dx is None else dx

        with ctx.surroundings.again(), _aliases(ctx.module, wanted) as aliases:
            if want_x:
                result = _joined(pieces(aliases))
            else:
                for _ in pieces(aliases):
                    pass
        sums = iter([s if s is None else s.to(p.dtype) for s, p in zip(sums, wanted, strict=True)])
        return None, None, result, None, *(next(sums) if needs else None for needs in ctx.needs_input_grad[4:])


def apply_tiled_mlp(fn, mlp_module, x, num_shards=None, compute_params=None):
    """`fn(mlp_module, x)` over pieces of the sequence one after the other; each is computed again in backward.

    What the layer keeps and needs while it runs is that of one piece: for a sequence of S tokens in n pieces, S / n times its
    intermediate size. The price is a second forward. (ALST, arXiv 2506.13996, section 3.1.)

    Args:
        fn: (module, (..., s, H)) -> (..., s, O): a function of each token alone.
        mlp_module: its parameters get gradients.
        x: (..., S, H), at least two dimensions.
        num_shards: pieces, as of torch.chunk; ceil(S / H), at least one, when None.
        compute_params: the parameters that `fn` uses, when None all of the module's. Those that do not require grad are left out.

    Returns:
        (..., S, O). Gradients are summed over the pieces in fp32 and reach each parameter once, so that DDP's and other hooks run once.

    Raises:
        ValueError: x has one dimension, num_shards is less than one, or fn changes another dimension than the last.
        TypeError: fn returns anything but one tensor.
        RuntimeError: parameters partitioned by DeepSpeed ZeRO-3.
    """
    if x.dim() < 2:
        raise ValueError(f"{_OP}: x has shape {tuple(x.shape)}, expected (..., tokens, hidden size)")
    if num_shards is None:
        num_shards = max(1, math.ceil(x.shape[-2] / max(1, x.shape[-1])))
    if num_shards < 1:
        raise ValueError(f"{_OP}: num_shards is {num_shards}, expected at least 1")
    if torch.compiler.is_compiling():  # the same by what a compiler knows; gradients are summed in the parameters' dtype
        return torch.cat([checkpoint(_piece, fn, mlp_module, part, use_reentrant=False) for part in x.chunk(num_shards, -2)], -2)
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, num_shards, compute_params)
