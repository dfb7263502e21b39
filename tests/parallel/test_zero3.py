"""ZeRO stage 3: parameters are empty outside their modules; the real DeepSpeed where it is installed, and what it promises."""

import copy
import importlib.util

import pytest
import torch
from ranks import DEVICE
from training import STEPS, WRAPPERS, Run, assert_same, full, fused_losses, model_of, patch, rank_inputs


def train(wrapped, backward, gradients, parameters):
    losses = []
    with fused_losses() as fused:
        for step in range(STEPS):
            loss = wrapped(**rank_inputs(step)).loss
            backward(loss)
            found = gradients()
            wrapped.step()
            losses.append(full(loss))
    clean = [{WRAPPERS.sub("", name): full(t) for name, t in d.items() if t is not None} for d in (found, parameters())]
    return Run(losses, *clean, len(fused))


def stand_in(kind, changes, adapter, checkpoint):
    import zero3

    start, runs = model_of(kind, **changes), []
    for patched in (False, True):
        model = inner = copy.deepcopy(start).to(DEVICE)
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if adapter:
            peft = pytest.importorskip("peft")
            torch.manual_seed(3)
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **adapter))
        if patched:
            patch(inner)
        with zero3.installed():
            wrapped = zero3.Zero3(model)
            named = dict(model.named_parameters())
            runs.append(train(wrapped, torch.Tensor.backward, lambda named=named: {n: p.ds_grad for n, p in named.items()},
                              lambda named=named, wrapped=wrapped: {n: wrapped.whole(p) for n, p in named.items()}))
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("kind, changes, adapter, checkpoint", [
    ("llama", {}, None, False),
    ("llama", {}, None, True),
    ("qwen3", {"tie_word_embeddings": True}, None, False),
    ("gemma2", {}, None, False),
    ("llama", {"head_bias": True}, None, False),
    ("llama", {}, dict(target_modules=["q_proj", "lm_head"]), False),
    ("llama", {}, dict(target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]), False),
], ids=["llama", "checkpointed", "tied", "gemma2", "bias", "lora", "saved"])
def test_contract(ranks, kind, changes, adapter, checkpoint):
    ranks(stand_in, kind, changes, adapter, checkpoint)


def real(kind):
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    deepspeed.init_distributed("nccl" if DEVICE == "cuda" else "gloo", auto_mpi_discovery=False)
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    }
    runs = []
    for patched in (False, True):
        model = model_of(kind)
        if patched:
            patch(model)
        engine = deepspeed.initialize(model=model, config=config)[0]
        named = dict(model.named_parameters())
        runs.append(train(engine, engine.backward, lambda named=named: {n: safe_get_full_grad(p) for n, p in named.items()},
                          lambda named=named: {n: safe_get_full_fp32_param(p) for n, p in named.items()}))
        engine.destroy()
    assert_same(runs[1], runs[0])


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_deepspeed(ranks, kind):
    ranks(real, kind)
