"""What the ops' autograd.Functions share."""

import functools

import torch


def first_derivative_only(op):
    """Decorates the `backward(ctx, *upstream)` of an op that has no second derivative.

    With `create_graph=True` the gradients carry a node that raises RuntimeError, naming `op`, when it is differentiated; until then
    they are as good as any. The node hangs on the upstream gradients and on what forward saved, which therefore has to descend from
    every input that the gradients depend on (:func:`descendant` where the input itself is not kept). Otherwise
    `torch.autograd.grad(..., inputs)` would find no way through it and leave its part out. A plain backward pays one question.
    """
    message = (f"{op}: its gradient has no derivative of its own (create_graph=True works as long as nobody differentiates it again); "
               "use PyTorch's own operations where second derivatives are needed").encode()

    def decorate(backward):
        @functools.wraps(backward)
        def wrapper(ctx, *upstream):
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, *upstream)
            origins = [t for t in (*upstream, *ctx.saved_tensors) if t is not None and t.requires_grad]
            with torch.no_grad():
                result = backward(ctx, *upstream)
            if not origins:
                return result
            gradients = result if isinstance(result, tuple) else (result,)
            given = [g for g in gradients if g is not None]
            linked = iter(torch._C._functions.DelayedError(message, len(given) + len(origins))(*given, *origins))
            gradients = tuple(g if g is None else next(linked) for g in gradients)
            return gradients if isinstance(result, tuple) else gradients[0]

        return wrapper

    return decorate


def descendant(t):
    """A tensor without elements that autograd knows as made from `t`, and that holds none of its memory."""
    with torch.enable_grad():
        return t[:0].clone()


def without_gradient(ctx, *outputs):
    """Marks the outputs that are not None as not differentiable. torch 2.11's compiler cannot trace the call; there the backward
    leaves their gradients out all the same."""
    outputs = [t for t in outputs if t is not None]
    if outputs and not (_OLD_COMPILER and torch.compiler.is_compiling()):
        ctx.mark_non_differentiable(*outputs)


_OLD_COMPILER = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
