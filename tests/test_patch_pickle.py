"""Patched models through pickle, torch.save and deepcopy."""

import copy
import functools
import io
import pickle
import subprocess
import sys

import pytest
import torch
from transformers.models.llama import modeling_llama

import liger_kernel.transformers as liger
from liger_kernel.patch import patch_classes, patch_model, tiny, unpatch


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


def data():
    ids = torch.randint(3, 1000, (2, 13), generator=torch.Generator().manual_seed(0))
    return dict(input_ids=ids, labels=ids)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"torch": saved, "deepcopy": copy.deepcopy,
          **{f"pickle{p}": lambda m, p=p: pickle.loads(pickle.dumps(m, p)) for p in (2, pickle.HIGHEST_PROTOCOL)}}


def grads(model):
    model.zero_grad(set_to_none=True)
    model.train()(**data()).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["llama", "gemma4_text", "nemotron"])
@pytest.mark.parametrize("how", COPIES)
def test_instance(how, kind):
    """The copy is patched, bound to itself alone, and can be undone, copied and pickled again; the original stays."""
    model = tiny.causal_lm(kind)
    plain = copy.deepcopy(model)
    patch_model(model)
    twin = COPIES[how](COPIES[how](model))
    for name, module in twin.named_modules():
        original = model.get_submodule(name)
        assert vars(module).keys() == vars(original).keys()
        for attribute, value in vars(module).items():
            if hasattr(value, "__self__"):
                assert value.__self__ is module and value.__func__ is vars(original)[attribute].__func__
    assert repr(twin) == repr(model)
    assert twin.train()(**data()).logits is None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for ours, theirs in zip(grads(twin), grads(plain), strict=True):
        assert (ours - theirs).abs().max() <= 5e-5 * theirs.abs().max()
    unpatch(twin)
    assert "Liger" not in repr(twin) and "Liger" in repr(model)
    assert [vars(m).keys() for m in twin.modules()] == [vars(m).keys() for m in plain.modules()]
    assert twin(**data()).logits is not None


def test_shallow_copy():
    """A shallow copy shares everything, as it does unpatched."""
    model = tiny.causal_lm("llama")
    patch_model(model)
    twin = copy.copy(model)
    torch.testing.assert_close(twin(**data()).loss, model(**data()).loss)


@pytest.mark.parametrize("how", COPIES)
def test_built_before_a_class_level_patch(how):
    """Under the name of its class pickle would find ours."""
    before = tiny.causal_lm("llama")
    theirs = grads(before)
    patch_classes("llama")
    after = tiny.causal_lm("llama")
    for model in (before, after):
        twin = COPIES[how](model)
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        for a, b in zip(grads(twin), theirs, strict=True):
            assert (a - b).abs().max() <= 5e-5 * b.abs().max()
    patch_model(before)
    twin = COPIES[how](before)
    unpatch("llama")
    unpatch(twin)
    assert type(twin.model.layers[0].mlp) is modeling_llama.LlamaMLP and "Liger" not in repr(twin)
    pickle.loads(pickle.dumps(before))


def test_subclass_of_a_replaced_class():
    """A subclass goes by its own name."""
    module = Sub(tiny.config("llama"))
    patch_classes("llama")
    assert type(pickle.loads(pickle.dumps(module))) is type(copy.deepcopy(module)) is Sub


class Sub(modeling_llama.LlamaMLP):
    pass


@pytest.mark.parametrize("level", ["instance", "class"])
def test_in_another_process(level, tmp_path):
    """A process that has patched nothing loads it: patched where the instance was, as transformers built it where the class was."""
    model = tiny.causal_lm("llama")
    patch_model(model) if level == "instance" else patch_classes("llama")
    torch.save(model, tmp_path / "model.pt")
    code = f"""
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
ids = torch.arange(8).reshape(1, 8)
assert (model.train()(input_ids=ids, labels=ids).logits is None) == ({level!r} == "instance")
print("LigerRMSNorm" in repr(model))
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == str(level == "instance")


def test_forward_of_others_stays():
    """A function that another library put before our patch is pickled as it would be without it."""
    model = tiny.causal_lm("llama")
    model.model.norm.forward = functools.partial(torch.mul, other=2)
    patch_model(model)
    twin = pickle.loads(pickle.dumps(model))
    assert twin.model.norm.forward.__func__ is liger.LigerRMSNorm.forward
    unpatch(twin)
    assert twin.model.norm(torch.ones(2)).tolist() == [2, 2]
