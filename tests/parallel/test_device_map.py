"""accelerate's device maps and offloading: parts of a model on several devices, or on none until they are needed."""

import copy

import pytest
import torch
from training import fused_losses, inputs, model_of, patch

accelerate = pytest.importorskip("accelerate")


def mapped(model, how, folder):
    """The model spread over devices; on a machine without GPUs over the CPU and a file."""
    far, near = ("cuda:0", "cuda:1") if torch.cuda.device_count() >= 2 else ("disk", "cpu")
    if how == "all offloaded":
        return accelerate.cpu_offload(model, execution_device="cpu")
    parts = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    places = dict.fromkeys(parts, near) | {"lm_head" if how == "head apart" else "model.layers.1": far}
    return accelerate.dispatch_model(model, places, main_device="cpu" if near == "cpu" else near, offload_dir=folder, force_hooks=True)


def first_device(batch):
    """Where the embeddings are."""
    return {name: t.to("cuda:1" if torch.cuda.device_count() >= 2 else "cpu") for name, t in batch.items()}


def step(model):
    """Loss, and gradients of what may be trained: offloaded weights are frozen, as with adapters."""
    model.zero_grad(set_to_none=True)
    batch = first_device(inputs(0))
    spread = "_hf_hook" in vars(model) or hasattr(model, "hf_device_map")
    out = model(**batch if spread else {name: t.cpu() for name, t in batch.items()})
    out.loss.backward()
    return out, {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs):
    torch.testing.assert_close(ours[0].loss.cpu(), theirs[0].loss.cpu(), rtol=1e-5, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    for name, want in theirs[1].items():
        assert (ours[1][name] - want).abs().max() <= 1e-4 * want.abs().max(), name


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["layers apart", "head apart", "all offloaded"])
def test_device_map(how, when, tmp_path):
    """Hooks stay where they are; a head whose weight is not there is called, and the loss is that of its logits."""
    plain = model_of()
    if how != "all offloaded":
        plain.model.embed_tokens.weight.requires_grad_(True)
    for name, parameter in plain.named_parameters():
        if how == "all offloaded" or torch.cuda.device_count() < 2 and ("layers.1" in name or "lm_head" in name):
            parameter.requires_grad_(False)
    if how == "all offloaded":
        plain.enable_input_require_grads()
    model = copy.deepcopy(plain)
    if when == "before":
        patch(model)
    model = mapped(model, how, str(tmp_path))
    if when == "after":
        patch(model)
    assert "LigerRMSNorm" in repr(model)
    with fused_losses() as fused:
        ours = step(model)
    assert_same(ours, step(plain))
    head_is_there = how == "layers apart" or torch.cuda.device_count() >= 2 and how == "head apart"
    assert ours[0].logits is None and len(fused) == head_is_there
    with torch.no_grad():
        model.eval(), plain.eval()
        batch = first_device(inputs(1))
        got = model(**batch, skip_logits=False).logits.cpu()
        torch.testing.assert_close(got, plain(**{n: t.cpu() for n, t in batch.items()}).logits, rtol=1e-4, atol=1e-5)
