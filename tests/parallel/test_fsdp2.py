"""FSDP 2 (`fully_shard`): parameters are DTensors, whole only around the forward of their unit."""

import dataclasses
import functools

import pytest
import torch
from ranks import DEVICE, WORLD
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import assert_same, collect, compare_under, full, inputs, model_of, patch, train

UNEVEN = 500 * max(WORLD, 2) + WORLD - 1  # rows of the head that do not divide by the number of ranks


def units(model, how):
    """The modules that become units, in order; a list is one unit of several modules."""
    inner = model.model
    return {
        "layers": [*inner.layers],
        "head": [*inner.layers, model.lm_head],
        "norm and head": [inner.embed_tokens, *inner.layers, [inner.norm, model.lm_head]],
        "blocks": [m for layer in inner.layers for m in (layer.mlp, layer.self_attn, layer.input_layernorm, layer)] + [model.lm_head],
        "backbone": [*inner.layers, inner],
    }[how]


def wrap(model, how="layers", checkpoint=None, root_policy=None, **options):
    if checkpoint == "hf":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif checkpoint == "hf reentrant":
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    elif checkpoint == "torch":
        layers = set(model.model.layers)
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: m in layers)
    mesh = torch.distributed.init_device_mesh(DEVICE, (WORLD,))
    for unit in units(model, how):
        fully_shard(unit, mesh=mesh, **options)
    if root_policy is not None:
        options["mp_policy"] = root_policy
    return fully_shard(model, mesh=mesh, **options)


def work(kind, how, options, config):
    compare_under(lambda model: wrap(model, how, **options), model=model_of(kind, **config))


@pytest.mark.parametrize("kind, how, options, config", [
    ("llama", "layers", {}, {}),
    ("llama", "head", {}, {"vocab_size": UNEVEN}),
    ("llama", "norm and head", {}, {}),
    ("llama", "blocks", {}, {}),
    ("llama", "backbone", {"reshard_after_forward": True}, {"vocab_size": UNEVEN}),
    ("llama", "head", {"reshard_after_forward": False}, {}),
    ("llama", "layers", {}, {"tie_word_embeddings": True}),
    ("qwen3", "head", {}, {}),
    ("gemma2", "layers", {}, {}),
])
def test_fully_shard(ranks, kind, how, options, config):
    """C93: the head in the root unit, in a unit of its own, in one with the norm, or outside that of the backbone."""
    ranks(work, kind, how, options, config)


@pytest.mark.parametrize("checkpoint", ["hf", "hf reentrant", "torch"])
@pytest.mark.parametrize("how", ["layers", "head"])
def test_checkpointed_layers(ranks, checkpoint, how):
    ranks(work, "llama", how, {"checkpoint": checkpoint}, {})


def frozen(how, which):
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(("lm_head" in name) == (which == "head only"))

    compare_under(lambda model: wrap(model, how), before=freeze)


@pytest.mark.parametrize("how", ["layers", "head"])
@pytest.mark.parametrize("which", ["head only", "all but the head"])
def test_partly_frozen(ranks, how, which):
    ranks(frozen, how, which)


def mixed(how, cast_output):
    """Parameters in bf16 for the arithmetic: no further from fp32 than twice what the unpatched model is."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half = dict(mp_policy=policy, root_policy=dataclasses.replace(policy, output_dtype=torch.float32) if cast_output else None)
    runs = []
    for patched, options in ((False, {}), (False, half), (True, half)):
        model = model_of().to(DEVICE)
        if patched:
            patch(model)
        runs.append(train(model, wrap(model, how, **options)))
    exact, theirs, ours = runs
    for a, b in zip(ours.losses, exact.losses, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=0)
    for name, want in exact.gradients.items():
        bound = 2 * (theirs.gradients[name] - want).norm() + 2**-8 * want.norm()
        assert (ours.gradients[name] - want).norm() <= bound, name


@pytest.mark.parametrize("how", ["layers", "head", "norm and head"])
@pytest.mark.parametrize("cast_output", [False, True])
def test_mixed_precision(ranks, how, cast_output):
    ranks(mixed, how, cast_output)


def evaluation():
    """Evaluation with and without logits, generation, and a training step after an evaluation that kept no graph."""
    plain, model = model_of().to(DEVICE), model_of().to(DEVICE)
    patch(model)
    model = wrap(model, "head")
    batch = inputs(7)
    for mode in (False, True):
        plain.train(mode), model.train(mode)
        want = plain(**batch)
        with torch.no_grad():
            got = model(**batch, skip_logits=False)
            torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got.loss, want.loss)
            torch.testing.assert_close(model(**batch, skip_logits=True).loss, want.loss)
            torch.testing.assert_close(model(input_ids=batch["input_ids"]).logits, want.logits, rtol=1e-4, atol=1e-5)
    model(**batch).loss.backward()
    want.loss.backward()
    for name, got in collect(model)[0].items():
        want = plain.get_parameter(name).grad
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), name


def test_evaluation(ranks):
    ranks(evaluation)


def accumulated():
    """Gradients of two batches, reduced once; then those of a step that reduces each time: equal."""
    results = []
    for together in (False, True):
        model = model_of().to(DEVICE)
        patch(model)
        model = wrap(model, "head")
        for half in range(2):
            if together:
                model.set_requires_gradient_sync(half == 1)
            model(**inputs(10 * half + torch.distributed.get_rank()), num_items_in_batch=36).loss.backward()
        results.append(collect(model)[0])
    for name, want in results[0].items():
        assert (results[1][name] - want).abs().max() <= 1e-5 * want.abs().max(), name


def test_accumulation(ranks):
    ranks(accumulated)


def meta():
    """Sharded on the meta device, then filled, as models are that no rank could hold: patched before and after."""
    start = model_of()
    state, runs = start.state_dict(), []
    for when in ("never", "before", "after"):
        with torch.device("meta"):
            model = type(start)(start.config).train()
        if when == "before":
            patch(model)
        wrap(model, "head")
        model.to_empty(device=DEVICE)
        if when == "after":
            patch(model)
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(model, {n: t.clone() for n, t in state.items()}, options=StateDictOptions(full_state_dict=True))
        for name, buffer in start.named_buffers():
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffer.clone().to(DEVICE))
        runs.append(train(model))
    for ours in runs[1:]:
        assert_same(ours, runs[0], start=start)


def test_meta_device(ranks):
    ranks(meta)


def sharded_head():
    """C93 as an op: the weight is a DTensor, sharded by rows or by columns; its gradient is one too."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(32, 256, generator=generator).to(DEVICE), torch.randn(1024, 256, generator=generator).to(DEVICE)
    labels = torch.randint(0, 1024, (32,), generator=generator).to(DEVICE)
    mesh = torch.distributed.init_device_mesh(DEVICE, (WORLD,))
    reference = [t.clone().requires_grad_() for t in (hidden, weight)]
    want = torch.nn.functional.cross_entropy(reference[0] @ reference[1].T, labels)
    want.backward()
    for dim in (0, 1):
        leaf = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(dim)]))
        x = hidden.clone().requires_grad_()
        loss = liger_fused_linear_cross_entropy(x, leaf, labels)
        loss.backward()
        assert isinstance(leaf.grad, DTensor) and leaf.grad.placements == leaf.placements
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(x.grad, reference[0].grad)
        torch.testing.assert_close(full(leaf.grad), reference[1].grad)


def test_sharded_head(ranks):
    ranks(sharded_head)
