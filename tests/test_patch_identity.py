"""Which classes a patch takes for its own, and what a second call with other flags does."""

import copy
import functools

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import liger_kernel.transformers as liger
from liger_kernel.patch import patch_classes, patch_model, tiny, unpatch


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


def data():
    ids = torch.randint(3, 1000, (2, 13), generator=torch.Generator().manual_seed(0))
    return dict(input_ids=ids, labels=ids)


class WithImages(modeling_llama.LlamaForCausalLM):
    """Adds something to the embeddings and to the loss, as many a user's model does."""

    def forward(self, input_ids=None, labels=None, images=None, **kwargs):
        embeddings = self.get_input_embeddings()(input_ids)
        out = super().forward(inputs_embeds=embeddings if images is None else embeddings + images, labels=labels, **kwargs)
        out.loss = None if out.loss is None else 2 * out.loss
        return out


class Inheriting(modeling_llama.LlamaForCausalLM):
    pass


def test_subclass_with_a_forward_of_its_own():
    """Its forward stays and is named in the report; its layers are patched, and with cross_entropy its loss function is."""
    plain = WithImages(tiny.config("llama")).train()
    model = copy.deepcopy(plain)
    given = dict(data(), images=torch.randn(2, 13, 64))
    report = patch_model(model)
    assert report.left == [("model", "WithImages has a forward of its own, which the fused loss would go around")]
    assert "forward" not in vars(model) and "LigerRMSNorm" in repr(model)
    for a in (model, copy.deepcopy(model)):
        torch.testing.assert_close(a(**given).loss, plain(**given).loss, rtol=1e-5, atol=0)
        assert a(**given).logits is not None
    report = patch_model(model, cross_entropy=True, fused_linear_cross_entropy=False)
    assert not report.left and model.loss_function.__name__ == "liger_causal_lm_loss"
    torch.testing.assert_close(model(**given).loss, plain(**given).loss, rtol=1e-5, atol=0)
    other = Inheriting(tiny.config("llama"))
    assert not patch_model(other).left and other.train()(**data()).logits is None


def test_class_level_reaches_the_super_of_a_subclass():
    model = WithImages(tiny.config("llama")).train()
    expected = model(**data()).loss
    patch_classes("llama")
    out = model(**data())
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected, rtol=1e-5, atol=0)
    assert any(where == "model" for where, _ in patch_model(model).left)


def test_foreign_classes_of_the_same_names():
    """Another package's LlamaForCausalLM, LlamaRMSNorm and LlamaMLP are not transformers'."""

    class LlamaRMSNorm(torch.nn.Module):
        def forward(self, x):
            return 3 * x

    class LlamaMLP(LlamaRMSNorm):
        pass

    class LlamaForCausalLM(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = tiny.config("llama")
            self.norm, self.mlp = LlamaRMSNorm(), LlamaMLP()

        def forward(self, input_ids, labels=None):
            return self.mlp(self.norm(input_ids))

    model = LlamaForCausalLM()
    report = patch_model(model)
    assert not [where for where, *_ in report.replaced if "rotary" not in where]
    assert [where for where, _ in report.left] == ["norm", "mlp", "loss"]
    assert model(torch.ones(2)).tolist() == [9, 9]


OFF = dict(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=False)


def state(model):
    return {
        "rms_norm": "LigerRMSNorm" in repr(model), "swiglu": "LigerSwiGLUMLP" in repr(model),
        "rope": modeling_llama.apply_rotary_pos_emb is liger.liger_rotary_pos_emb,
        "fused_linear_cross_entropy": model.train()(**data()).logits is None,
    }


@pytest.mark.parametrize("flag", OFF)
def test_second_call_turns_off(flag):
    """What the later call turns off goes back and is reported so; the rest is reported as replaced before."""
    model = tiny.causal_lm("llama")
    first = patch_model(model)
    report = patch_model(model, **{flag: False})
    assert state(model) == {name: name != flag for name in OFF}
    assert not report.replaced and report.left and all("off" in why for _, why in report.left)
    assert len(report.already) + len(report.left) == len(first.replaced)
    again = patch_model(model)
    assert {where for where, *_ in again.replaced} == {where for where, _ in report.left} and all(state(model).values())
    patch_model(model, **OFF)
    assert not any(state(model).values()) and not any("_liger_undo" in vars(m) for m in model.modules())


@pytest.mark.parametrize("flag", OFF)
def test_second_class_level_call_turns_off(flag):
    patch_classes("llama")
    report = patch_classes("llama", **{flag: False})
    assert not report.replaced and len(report.left) == 1 and "off" in report.left[0][1]
    assert state(tiny.causal_lm("llama")) == {name: name != flag for name in OFF}


def test_fused_and_plain_loss_replace_each_other():
    model = tiny.causal_lm("llama").train()
    for level in ("instance", "class"):
        for loss in ("fused_linear_cross_entropy", "cross_entropy", "fused_linear_cross_entropy"):
            flags = {"cross_entropy": False, "fused_linear_cross_entropy": False, loss: True}
            patch_model(model, **flags) if level == "instance" else patch_classes("llama", **flags)
            fused = loss == "fused_linear_cross_entropy"
            assert (model(**data()).logits is None) == fused
            assert model.loss_function.__module__.startswith("transformers" if fused else "liger_kernel")
        unpatch(model)


def test_off_for_one_and_on_for_others():
    """A model that turns something off says when it stays, because all models of the process have it."""
    one, other = tiny.causal_lm("llama"), tiny.causal_lm("llama")
    patch_model(one), patch_model(other)
    report = patch_model(one, rope=False)
    assert [now for *_, now in report.already if "rotary" in now] == ["liger_rotary_pos_emb (whole process)"]
    unpatch(other)
    assert modeling_llama.apply_rotary_pos_emb is not liger.liger_rotary_pos_emb
    unpatch(one)
    patch_classes("llama")
    report = patch_model(one, **OFF)
    assert not report.left and {now for *_, now in report.already if "all of its class" in now} == {
        "LigerRMSNorm (all of its class)", "LigerSwiGLUMLP (all of its class)", "llama.lce_forward (all of its class)"}
    assert all(state(one).values())
    patch_classes("mistral", rms_norm=False)
    assert modeling_mistral.MistralRMSNorm.__name__ == "MistralRMSNorm"


def test_forward_wrapped_since_is_named():
    model = tiny.causal_lm("llama")
    patch_model(model)
    ours = model.forward
    model.forward = functools.partial(ours)
    assert ("model", "its forward has been replaced by other code since, which may still call ours") in patch_model(
        model, fused_linear_cross_entropy=False).left
