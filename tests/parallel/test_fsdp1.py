"""FSDP 1 (`FullyShardedDataParallel`): a unit's parameters are views of one flat tensor while its forward runs."""

import functools

import pytest
import torch
from ranks import DEVICE
from training import assert_same, collect, model_of, patch, train

fsdp = pytest.importorskip("torch.distributed.fsdp")
FSDP = fsdp.FullyShardedDataParallel


def wrap(model, how, **options):
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    device = torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
    options = dict(device_id=device, use_orig_params=True, **options)
    if how == "head":  # a head and layers wrapped by hand
        model.lm_head = FSDP(model.lm_head, **options)
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = FSDP(layer, **options)
    classes = {"layers": {type(model.model.layers[0])}, "linears": {torch.nn.Linear}}.get(how)
    return FSDP(model, auto_wrap_policy=classes and ModuleWrapPolicy(classes), **options)


def gathered(wrapped, _):
    with FSDP.summon_full_params(wrapped, with_grads=True):
        return collect(wrapped)


def work(kind, how, checkpoint):
    start, runs = model_of(kind), []
    for patched in (False, True):
        model = model_of(kind).to(DEVICE)
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if patched:
            patch(model)
        wrapped = wrap(model, how)
        runs.append(train(model, wrapped, collect=functools.partial(gathered, wrapped)))
    assert_same(runs[1], runs[0], start=start)


@pytest.mark.parametrize("kind, how, checkpoint", [
    ("llama", "root", False), ("llama", "layers", False), ("llama", "layers", True), ("llama", "head", False), ("llama", "linears", False),
    ("qwen3", "head", True), ("gemma2", "layers", False),
])
def test_fsdp1(ranks, kind, how, checkpoint):
    ranks(work, kind, how, checkpoint)


def mixed(how):
    runs, policy = [], fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for patched, options in ((False, {}), (False, {"mixed_precision": policy}), (True, {"mixed_precision": policy})):
        model = model_of().to(DEVICE)
        if patched:
            patch(model)
        wrapped = wrap(model, how, **options)
        runs.append(train(model, wrapped, collect=functools.partial(gathered, wrapped)))
    exact, theirs, ours = runs
    for name, want in exact.gradients.items():
        bound = 2 * (theirs.gradients[name] - want).norm() + 2**-8 * want.norm()
        assert (ours.gradients[name] - want).norm() <= bound, name


@pytest.mark.parametrize("how", ["layers", "head"])
def test_mixed_precision(ranks, how):
    ranks(mixed, how)


def frozen():
    """A frozen backbone and a head that is trained, each a unit of its own."""
    runs = []
    for patched in (False, True):
        model = model_of().to(DEVICE)
        model.model.requires_grad_(False)
        if patched:
            patch(model)
        wrapped = wrap(model, "head")
        runs.append(train(model, wrapped, collect=functools.partial(gathered, wrapped)))
    assert_same(runs[1], runs[0], start=model_of())
    assert list(runs[1].gradients) == ["lm_head.weight"]


def test_trained_head(ranks):
    ranks(frozen)
