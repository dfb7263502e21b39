"""Two training steps of a small model under a wrapper, patched and as it ships, and their comparison."""

import contextlib
import copy
import dataclasses
import re

import torch
from ranks import DEVICE, WORLD

from liger_kernel.patch import compare, patch_model, tiny
from liger_kernel.patch.engine import patch_model_by
from liger_kernel.patch.models import by_type
from liger_kernel.transformers.model import loss_utils

STEPS = 2
WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.|^module\.")


def model_of(kind="llama", head_bias=False, **changes):
    """A small model whose heads, channels and vocabulary can be divided among the ranks, with a bias on the head if asked for."""
    parts = max(WORLD, 2)
    sizes = dict(num_attention_heads=2 * parts, num_key_value_heads=parts, hidden_size=32 * parts, intermediate_size=48 * parts,
                 vocab_size=500 * parts)
    model = tiny.causal_lm(kind, **{**sizes, **changes}).train()
    if head_bias:
        rows = model.config.vocab_size
        model.lm_head.bias = torch.nn.Parameter(0.1 * torch.randn(rows, generator=torch.Generator().manual_seed(0)))
    return model


def patch(model):
    """Every replacement that there is for the model."""
    row = by_type()[model.config.model_type]
    return patch_model_by(row, model, **compare.everything(row)) if model.config.model_type != "llama" else patch_model(model)


def inputs(seed, batch=2, length=12):
    """Tokens and labels, some of which are ignored, on this rank's device; equal seeds give equal ones."""
    ids = torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :4] = -100
    return dict(input_ids=ids.to(DEVICE), labels=labels.to(DEVICE))


def rank_inputs(step):
    """Another batch for every rank and step."""
    return inputs(10 * step + torch.distributed.get_rank())


def full(tensor):
    """The whole of a DTensor; a copy of any other tensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).float().clone()


@dataclasses.dataclass
class Run:
    losses: list
    gradients: dict  # of the last step, gathered
    parameters: dict  # after it
    fused: int  # how often the loss was taken from hidden states


@contextlib.contextmanager
def fused_losses():
    """A list that grows with each loss that a patched model takes from hidden states."""
    calls, original = [], loss_utils.LigerForCausalLMLoss

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    loss_utils.LigerForCausalLMLoss = counted
    try:
        yield calls
    finally:
        loss_utils.LigerForCausalLMLoss = original


def collect(model):
    """({name: gradient}, {name: parameter}) of a model whose parameters are whole, or DTensors."""
    named = {WRAPPERS.sub("", name): p for name, p in model.named_parameters()}
    return {n: full(p.grad) for n, p in named.items() if p.grad is not None}, {n: full(p) for n, p in named.items()}


def train(model, wrapped=None, inputs=rank_inputs, context=contextlib.nullcontext, collect=collect):
    """STEPS steps of SGD with momentum; `context` is around the forward, `collect` brings the results of all ranks together."""
    wrapped = model if wrapped is None else wrapped
    # not foreach: torch refuses plain tensors beside DTensors, and 2.11 applies momentum to the unpatched model's pending sums wrongly
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.05, momentum=0.9, foreach=False)
    losses = []
    with fused_losses() as fused:
        for step in range(STEPS):
            optimizer.zero_grad()
            with context():
                loss = wrapped(**inputs(step)).loss
            loss.backward()
            optimizer.step()
            losses.append(full(loss))
    return Run(losses, *collect(model), len(fused))


def assert_same(ours, theirs, tolerance=1e-4, start=None, fused=True):
    """Losses, gradients and parameters agree within `tolerance` of the largest number of each tensor; parameters within that of the
    step that they have made from `start`, a model, too."""
    assert ours.fused == (STEPS if fused else 0) and theirs.fused == 0, f"{ours.fused} of {STEPS} losses were fused"
    for a, b in zip(ours.losses, theirs.losses, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=0)
    assert ours.gradients.keys() == theirs.gradients.keys()
    assert ours.parameters.keys() == theirs.parameters.keys()
    assert theirs.gradients, "nothing has been trained"
    before = {} if start is None else collect(start)[1]
    for kind in ("gradients", "parameters"):
        for name, want in getattr(theirs, kind).items():
            got = getattr(ours, kind)[name]
            assert got.shape == want.shape, (kind, name, got.shape, want.shape)
            largest = want.abs().max()
            if kind == "parameters" and name in before and name in theirs.gradients:
                largest = (want - before[name].to(want.device)).abs().max() + 1e-6 * largest
            error = (got - want).abs().max()
            assert error <= tolerance * largest + 1e-12, f"{kind} of {name}: error {error:.2g}, largest {largest:.2g}"


def compare_under(wrap, kind="llama", tolerance=1e-4, model=None, before=None, fused=True, **options):
    """Trains two copies of a model, one of them patched, each inside `wrap(model)`, and compares them.

    `before(model)`, called on both before patching, changes the model. -> (the patched run, the other one)
    """
    start = model_of(kind) if model is None else model
    if before is not None:
        before(start)
    runs = []
    for patched in (False, True):
        copied = copy.deepcopy(start).to(DEVICE)
        if patched:
            patch(copied)
        runs.append(train(copied, wrap(copied), **options))
    theirs, ours = runs
    assert_same(ours, theirs, tolerance, start, fused)
    return ours, theirs
