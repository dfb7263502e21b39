"""Patched models under torch.compile: whole training steps without a graph break (C119)."""

import copy

import pytest
import torch

from liger_kernel.patch import compare, patch_classes, patch_model, tiny, unpatch
from liger_kernel.patch.engine import patch_classes_by, patch_model_by
from liger_kernel.patch.models import by_type


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    unpatch()
    torch._dynamo.reset()


def step(run, model, **inputs):
    model.zero_grad(set_to_none=True)
    out = run(**inputs)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, tolerance):
    torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=tolerance, atol=0)
    for name, want in theirs[1].items():
        assert (ours[1][name].float() - want.float()).abs().max() <= tolerance * want.float().abs().max(), name


@pytest.mark.parametrize("kind, level", [("llama", "instance"), ("llama", "class"), ("mistral", "instance"), ("qwen2", "instance")])
def test_training_step(kind, level):
    """fullgraph, forward and backward, two lengths; equal to the unpatched eager model."""
    plain = tiny.causal_lm(kind, num_hidden_layers=2 if (kind, level) == ("llama", "instance") else 1).train()
    model = copy.deepcopy(plain)
    theirs = []
    batches = [torch.randint(3, 1000, (2, length), generator=torch.Generator().manual_seed(length)) for length in (12, 17)]
    for ids in batches:
        theirs.append(step(plain, plain, input_ids=ids, labels=ids))
    if level == "instance":
        patch_model(model)
    else:
        patch_classes(kind)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for ids, expected in zip(batches, theirs, strict=True):
        assert_same(step(compiled, model, input_ids=ids, labels=ids), expected, 2e-5)
    ids = batches[0]
    items = step(compiled, model, input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(5), return_token_accuracy=True)
    assert items[0].token_accuracy.dim() == 0
    torch.testing.assert_close(items[0].loss, theirs[0][0].loss * 22 / 5, rtol=1e-5, atol=0)


def test_evaluation():
    """With logits and labels, without labels, and without logits."""
    plain = tiny.causal_lm("llama").eval()
    model = copy.deepcopy(plain)
    patch_model(model)
    ids = torch.randint(3, 1000, (2, 12))
    expected = plain(input_ids=ids, labels=ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = compiled(input_ids=ids, labels=ids)
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(compiled(input_ids=ids).logits, expected.logits, rtol=1e-5, atol=1e-5)
        skipped = compiled(input_ids=ids, labels=ids, skip_logits=True)
    assert skipped.logits is None
    torch.testing.assert_close(skipped.loss, expected.loss, rtol=1e-5, atol=0)


def test_inductor_bf16():
    """The default compiler, in bf16: within its rounding of the patched model run eagerly."""
    model = tiny.causal_lm("llama", num_hidden_layers=1).bfloat16().train()
    patch_model(model)
    ids = torch.randint(3, 1000, (2, 12), generator=torch.Generator().manual_seed(0))
    eager = step(model, model, input_ids=ids, labels=ids)
    compiled = torch.compile(model, fullgraph=True)
    assert_same(step(compiled, model, input_ids=ids, labels=ids), eager, 2e-2)


@pytest.mark.parametrize("kind, level", [("gemma2", "instance"), ("gemma4_text", "class"), ("deepseek_v3", "instance")])
def test_other_families(kind, level):
    """Capped logits, norms without a weight, pairs of channels, class-level forwards that choose: fullgraph too."""
    if kind != "gemma2" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip("torch 2.11 cannot compile transformers' own experts in one graph")
    row, inputs = by_type()[kind], compare.inputs(length=12)
    plain = tiny.causal_lm(kind, **compare.all_experts(row)).train()
    model = copy.deepcopy(plain)
    expected = step(plain, plain, **inputs)
    if level == "instance":
        patch_model_by(row, model, **compare.everything(row))
    else:
        patch_classes_by(row, **compare.everything(row))
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected[0].loss, rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        if name in expected[1]:
            assert (parameter.grad - expected[1][name]).abs().max() <= 5e-5 * expected[1][name].abs().max(), name
