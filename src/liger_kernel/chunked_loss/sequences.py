"""Losses of the log-probabilities of whole sequences, and their gradients, without the logits: what the preference losses share.

How such a loss depends on a token is known only when the last token of its sequence, or pair of sequences, has been seen. There are
two ways to the gradients, which give the same results:

* in chunks: the logits of a whole group of sequences are held until its loss is known (three products of 2 tokens H V operations);
* in tiles: log-probabilities first, then the logits again, a few columns of all tokens at a time (four products, fixed memory).
"""

import torch

from liger_kernel.core.autograd import descendant, first_derivative_only
from liger_kernel.core.tensors import gather_dtensor, has_values, product_dtype
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_backward
from liger_kernel.ops.fused_linear_log_probs import log_probs_and_gradients, log_probs_and_gradients_in_tiles

# Most bytes of logits of one group that are held to save the fourth product. On CPUs that product takes as long as everything that is
# not a product in fp32 (tiles are a tenth slower there than the unfused code), but a fraction of it in bf16.
_CUDA_BYTES, _CPU_BYTES, _CPU_BYTES_FP32 = 2 << 30, 64 << 20, 1 << 30


def per_group(loss_fn):
    """Marks a loss function as a sum over its groups (pairs, or sequences) of terms that depend on one group each, divided by numbers
    of the whole batch: only such a one may be called with some of the groups at a time."""
    loss_fn.per_group = True
    return loss_fn


def part_of(options, begin, end, count):
    """`options` for groups [begin, end) of `count`: tensors with one element a group are cut, everything else is as it is."""
    def cut(value):
        return value[begin:end] if isinstance(value, torch.Tensor) and value.shape == (count,) else value

    return {name: cut(value) for name, value in options.items()}


def check_reference(name, ref_input, target):
    """ValueError unless the reference model's hidden states are (B, T, H')."""
    if ref_input.dim() != 3 or ref_input.shape[:2] != target.shape:
        raise ValueError(f"{name}: ref_input is {tuple(ref_input.shape)}, expected {tuple(target.shape)} and its width, as target")


def sequence_log_probs(logp, valid, average):
    """Sums over the last dimension of the log-probabilities of valid tokens, or their averages; 0 without a valid token."""
    total = torch.where(valid, logp, 0).sum(-1)
    return total / valid.sum(-1).clamp(min=1) if average else total


def logit_sums(x, weight, bias):
    """(B,) fp32: the sum of all logits of each sequence of x (B, T, H), through sums of rows: no logits, no product of matrices."""
    with torch.no_grad():
        columns = sum(rows.sum(0, dtype=torch.float32) for rows in weight.split(1 << 14))  # the CPU converts before it sums
        sums = (x.sum(1, dtype=torch.float32) * columns).sum(-1)
        return sums if bias is None else sums + x.shape[1] * bias.sum(dtype=torch.float32)


class _GroupLoss:
    """The `coefficients` argument of :func:`log_probs_and_gradients`: d(loss)/d(logp) by autograd of `function`.

    Attributes:
        losses, results: what `function` returned, a scalar and a tuple of metrics, for each call.
    """

    def __init__(self, function, shape, gradients):
        self.function, self.shape, self.gradients = function, shape, gradients
        self.losses, self.results = [], []

    def __call__(self, begin, end, chunk):
        groups, sequences, length = self.shape
        rows = sequences * length
        begin, end = (begin // rows, end // rows) if rows else (0, groups)
        logp = chunk.logp.detach().requires_grad_(self.gradients)
        with torch.set_grad_enabled(self.gradients):
            loss, metrics = self.function(logp.view(end - begin, sequences, length), begin, end)
            gradient = torch.autograd.grad(loss, logp, allow_unused=True)[0] if loss.requires_grad else None
        self.losses.append(loss.detach())
        self.results.append(metrics)
        return gradient

    def total(self):
        """(loss, metrics) of all groups: scalars are summed, tensors with one element a group concatenated."""
        if len(self.losses) == 1:
            return self.losses[0], self.results[0]
        return sum(self.losses), tuple(
            torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].dim() else sum(parts)
            for parts in zip(*self.results, strict=True))


def loss_and_gradients(function, x, weight, target, bias, tensors, ignore_index=-100, in_parts=False):
    """Loss and metrics of groups of sequences, and the gradients of the loss, without autograd.

    Args:
        function: (logp (groups, S, T) fp32, begin, end) -> (scalar, tuple of metrics), the part of groups [begin, end) in the loss.
            log-probabilities at ignored positions are 0.
        x, target: (groups, S, T, H) and (groups, S, T), any strides.
        weight, bias: (V, H), (V,) or None.
        tensors: (input, weight, bias) as the caller got them; a gradient is made for those that require one.
        in_parts: `function` may be called for some of the groups at a time.

    Returns:
        (loss, metrics, dx, dw, db), gradients of the tensors' dtypes, or fp32 in fp16; None where none is wanted.
    """
    wanted = [t is not None and t.requires_grad for t in tensors]
    loss = _GroupLoss(function, target.shape, any(wanted))
    arguments = dict(zip(("want_dx", "want_dw", "want_db"), wanted, strict=True), ignore_index=ignore_index)
    group = target.shape[1] * target.shape[2]
    if any(wanted) and in_parts and target.numel() and _logits_fit(x, weight, group):
        _, *gradients = log_probs_and_gradients(x, weight, target, loss, bias, group=group, **arguments)
    else:
        _, *gradients = log_probs_and_gradients_in_tiles(x, weight, target, loss, bias, **arguments)
    return (*loss.total(), *gradients)


def _logits_fit(x, weight, rows):
    """Whether the logits of that many rows may be held. Not in fp16, whose coefficients have to be known before they are scaled."""
    dtype = product_dtype("fused_linear_log_probs", x, weight)
    if dtype == torch.float16 or not has_values(x):
        return False
    if x.is_cuda:
        return rows * weight.shape[0] * dtype.itemsize <= _CUDA_BYTES
    return rows * weight.shape[0] * 4 <= (_CPU_BYTES_FP32 if dtype == torch.float32 else _CPU_BYTES)


def pick_inputs(arguments):
    """What an autograd.Function's `apply` hands on: whole tensors for DTensors, and no tensor that asks for a gradient where nobody
    will (forward cannot see torch.no_grad())."""
    arguments = [gather_dtensor(t) for t in arguments]
    if torch.is_grad_enabled():
        return arguments
    return [t.detach() if isinstance(t, torch.Tensor) else t for t in arguments]


def call(function, *arguments):
    """`function.apply(*arguments)`, or under torch.compile the same loss made of operations that autograd differentiates: the compiler
    traces no gradients made in a forward."""
    if torch.compiler.is_compiling():
        return function.forward(None, *pick_inputs(arguments))
    return function.apply(*arguments)


def keep(ctx, gradients, tensors):
    """Saves the gradients of `tensors` for :func:`kept`."""
    ctx.dtypes = [None if t is None else t.dtype for t in tensors]
    ctx.save_for_backward(*gradients, *(descendant(t) for t in tensors if t is not None and t.requires_grad))


def kept(ctx, upstream):
    """The saved gradients times the loss's upstream gradient, in the tensors' dtypes.

    Args:
        upstream: what backward got: gradients of the outputs, or a tuple of them in a tuple. Those of metrics are ignored."""
    while isinstance(upstream, (tuple, list)):
        upstream = upstream[0]
    return _scaled(ctx, upstream)


@first_derivative_only("chunked_loss")
def _scaled(ctx, upstream):
    gradients = fused_linear_cross_entropy_backward(upstream, *ctx.saved_tensors[:3])
    return tuple(None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))
