"""What a patch reaches and what it leaves alone: instances, classes, undo, other libraries' patches."""

import copy
import dataclasses
import importlib
import inspect
import subprocess
import sys

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2

import liger_kernel.transformers as liger
from liger_kernel.patch import patch_classes, patch_model, tiny, unpatch
from liger_kernel.patch.engine import patch_classes_by
from liger_kernel.patch.models import rows
from liger_kernel.transformers import monkey_patch

MODELING = {"llama": modeling_llama, "mistral": modeling_mistral, "qwen2": modeling_qwen2}
NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}


@pytest.fixture(autouse=True)
def _undo():
    before = {m: dict(vars(m)) for m in MODELING.values()}
    yield
    unpatch()
    for module, names in before.items():
        assert {k: v for k, v in vars(module).items() if not k.startswith("__")} == {
            k: v for k, v in names.items() if not k.startswith("__")
        }


def data():
    ids = torch.randint(3, 1000, (2, 13), generator=torch.Generator().manual_seed(0))
    return dict(input_ids=ids, labels=ids)


def loss_and_grads(model):
    model.zero_grad(set_to_none=True)
    out = model.train()(**data())
    out.loss.backward()
    return out, [p.grad.clone() for p in model.parameters()]


def assert_same_run(ours, theirs):
    torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=1e-6, atol=0)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


def kinds(model):
    return {type(m).__name__ if m._get_name is type(m)._get_name else m._get_name() for m in model.modules()}


@pytest.mark.parametrize("row", MODELING)
def test_class_level_before_and_after_construction(row):
    """A call without a model serves models built before it and after it, and gives back both."""
    before = tiny.causal_lm(row)
    theirs = loss_and_grads(before)
    getattr(liger, f"apply_liger_kernel_to_{row}")()
    after = tiny.causal_lm(row)
    assert_same_run(loss_and_grads(before), theirs)
    assert_same_run(loss_and_grads(after), theirs)
    for model in (before, after):
        out = model.train()(**data())
        assert out.logits is None, "the fused loss is in use"
        assert "LigerRMSNorm" in repr(model.model.norm)
        assert type(model).forward is importlib.import_module(f"liger_kernel.transformers.model.{row}").lce_forward
    modeling, name = MODELING[row], NAMES[row]
    assert getattr(modeling, f"{name}RMSNorm") is liger.LigerRMSNorm
    assert getattr(modeling, f"{name}MLP") is liger.LigerSwiGLUMLP
    assert modeling.apply_rotary_pos_emb == liger.liger_rotary_pos_emb
    assert isinstance(after.model.norm, liger.LigerRMSNorm) and isinstance(after.model.layers[0].mlp, liger.LigerSwiGLUMLP)
    assert before.state_dict().keys() == after.state_dict().keys()
    unpatch(row)
    assert "LigerRMSNorm" not in repr(before.model.norm)
    for model in (before, after):
        out = loss_and_grads(model)
        assert out[0].logits is not None
        assert_same_run(out, theirs)


def test_class_level_runs_our_ops_in_existing_models(monkeypatch):
    """Not only names: the forward of a module built before the call is ours."""
    model = tiny.causal_lm("llama")
    liger.apply_liger_kernel_to_llama()
    calls = []
    ops = {"LigerRMSNormFunction": "rms_norm", "LigerRopeFunction": "rope", "LigerSiLUMulFunction": "swiglu"}
    for function, folder in ops.items():
        cls = getattr(importlib.import_module(f"liger_kernel.ops.{folder}"), function)
        original = cls.apply
        monkeypatch.setattr(cls, "apply", lambda *a, original=original, function=function: (calls.append(function), original(*a))[1])
    model(**data())
    assert {name: calls.count(name) for name in ops} == {"LigerRMSNormFunction": 5, "LigerRopeFunction": 2, "LigerSiLUMulFunction": 2}


def test_biases_survive_class_level():
    """Checkpoints with MLP biases load into models built after a class-level patch."""
    plain = tiny.causal_lm("llama", mlp_bias=True)
    theirs = loss_and_grads(plain)
    liger.apply_liger_kernel_to_llama()
    model = modeling_llama.LlamaForCausalLM(plain.config)
    model.load_state_dict(plain.state_dict())
    assert model.model.layers[0].mlp.down_proj.bias is not None
    assert_same_run(loss_and_grads(model), theirs)


def test_other_activation_is_left_alone():
    """A gated MLP with GELU keeps its own forward, on both levels, and the report says why."""
    model = tiny.causal_lm("llama", hidden_act="gelu")
    theirs = loss_and_grads(model)
    report = patch_model(model)
    assert [why for where, why in report.left if where.endswith("mlp")] == ["its activation is GELUActivation, not silu"] * 2
    assert_same_run(loss_and_grads(model), theirs)
    unpatch(model)
    patch_classes("llama")
    assert_same_run(loss_and_grads(model), theirs)
    with pytest.raises(ValueError, match="(?i)not supported"):
        tiny.causal_lm("llama", hidden_act="gelu")


def test_instance_leaves_other_models_alone():
    """C107: A has every replacement, B has none; undone, A has none either; torch is untouched throughout."""
    cross_entropy, layer_norm = torch.nn.functional.cross_entropy, torch.nn.LayerNorm
    a = tiny.causal_lm("llama")
    b = copy.deepcopy(a)
    theirs = loss_and_grads(b)
    report = patch_model(a)
    assert not report.left and len(report.replaced) == 1 + 1 + 2 + 5
    c = tiny.causal_lm("llama")
    assert modeling_llama.apply_rotary_pos_emb is liger.liger_rotary_pos_emb  # process-wide, as documented
    for other in (b, c):
        assert not any("Liger" in kind for kind in kinds(other))
        run = loss_and_grads(other)
        assert run[0].logits is not None
        assert_same_run(run, theirs)
    assert modeling_llama.LlamaRMSNorm.__module__ == modeling_llama.__name__
    norm, mlp = a.model.norm, a.model.layers[0].mlp
    assert norm.forward.__func__ is liger.LigerRMSNorm.forward and norm.extra_repr.__func__ is liger.LigerRMSNorm.extra_repr
    assert norm._get_name() == "LigerRMSNorm" and type(norm) is modeling_llama.LlamaRMSNorm
    assert (norm.offset, norm.casting_mode, norm.row_mode, norm.variance_epsilon) == (0.0, "llama", None, a.config.rms_norm_eps)
    assert mlp.forward.__func__ is liger.LigerSwiGLUMLP.forward and mlp._get_name() == "LigerSwiGLUMLP"
    assert a.state_dict().keys() == b.state_dict().keys()
    assert torch.nn.functional.cross_entropy is cross_entropy and torch.nn.LayerNorm is layer_norm

    untouched = [set(m.__dict__) for m in b.modules()]
    unpatch(a)
    assert [set(m.__dict__) for m in a.modules()] == untouched
    assert modeling_llama.apply_rotary_pos_emb is not liger.liger_rotary_pos_emb
    assert_same_run(loss_and_grads(a), theirs)


def test_twice_equals_once():
    """C106: patching again changes nothing, on either level and in either order; one undo suffices."""
    model = tiny.causal_lm("qwen2")
    theirs = loss_and_grads(model)
    assert patch_model(model).replaced and not patch_model(model).replaced
    assert patch_classes("qwen2").replaced and not patch_classes("qwen2").replaced
    assert not patch_model(model).replaced
    assert_same_run(loss_and_grads(model), theirs)
    evaluated = model.eval()(**data(), skip_logits=False)  # through the original forward, not around in circles
    torch.testing.assert_close(evaluated.loss, theirs[0].loss)
    unpatch("qwen2")
    assert model.train()(**data()).logits is None  # the instance is still patched
    assert modeling_qwen2.apply_rotary_pos_emb is liger.liger_rotary_pos_emb
    unpatch(model)
    assert modeling_qwen2.apply_rotary_pos_emb is not liger.liger_rotary_pos_emb
    assert_same_run(loss_and_grads(model), theirs)
    assert not any("Liger" in kind for kind in kinds(model))


def test_flags():
    """C84: each flag alone replaces its kind and nothing else; what is off is reported."""
    off = dict(rope=False, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=False, swiglu=False)
    expected = {"rms_norm": 5, "swiglu": 2, "rope": 1, "fused_linear_cross_entropy": 1, "cross_entropy": 1}
    for flag, count in expected.items():
        model = tiny.causal_lm("llama")
        theirs = loss_and_grads(model)
        report = patch_model(model, **{**off, flag: True})
        assert len(report.replaced) == count and len(report.left) == 9 - count, report
        assert_same_run(loss_and_grads(model), theirs)
        assert ("LigerRMSNorm" in repr(model)) == (flag == "rms_norm")
        unpatch(model)
        assert not patch_model(model, **dict.fromkeys(off)).replaced  # None means off
    with pytest.raises(AssertionError, match="cannot both be True"):
        liger.apply_liger_kernel_to_llama(cross_entropy=True)
    with pytest.raises(TypeError):
        liger.apply_liger_kernel_to_llama(geglu=True)


@pytest.mark.parametrize("level", ["instance", "class"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy(level, dtype):
    """The model's own loss, nothing else: fp32 from bf16 logits, logits kept, LOSS_MAPPING as it was."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    model = tiny.causal_lm("mistral").to(dtype)
    theirs = loss_and_grads(model)
    flags = dict(cross_entropy=True, fused_linear_cross_entropy=False, rms_norm=False, swiglu=False, rope=False)
    liger.apply_liger_kernel_to_mistral(**flags, model=model if level == "instance" else None)
    assert model.loss_function.__module__.startswith("liger_kernel")
    ours = loss_and_grads(model)
    assert ours[0].logits is not None and ours[0].loss.dtype == torch.float32
    torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=1e-6, atol=0)
    for a, b in zip(ours[1], theirs[1], strict=True):
        assert (a - b).abs().max() <= (2e-5 if dtype == torch.float32 else 2e-2) * b.abs().max()
    assert LOSS_MAPPING[model.loss_type] is ForCausalLMLoss
    items = model(**data(), num_items_in_batch=10).loss
    torch.testing.assert_close(items, ours[0].loss * 24 / 10)
    unpatch("mistral"), unpatch(model)
    assert model.loss_function is ForCausalLMLoss


def test_reload_undoes_class_level():
    """importlib.reload(modeling) starts over, and can be patched again. In a process of its own: others keep the old classes."""
    code = """
import importlib
from transformers.models.llama import modeling_llama
import liger_kernel.transformers as liger
liger.apply_liger_kernel_to_llama()
assert modeling_llama.LlamaRMSNorm is liger.LigerRMSNorm
importlib.reload(modeling_llama)
assert modeling_llama.LlamaRMSNorm is not liger.LigerRMSNorm
assert modeling_llama.apply_rotary_pos_emb != liger.liger_rotary_pos_emb
liger.apply_liger_kernel_to_llama()
assert modeling_llama.LlamaRMSNorm is liger.LigerRMSNorm
assert modeling_llama.LlamaForCausalLM.forward.__name__ == "lce_forward"
liger_patch = importlib.import_module("liger_kernel.patch")
liger_patch.unpatch("llama")
assert modeling_llama.LlamaForCausalLM.forward.__name__ == "forward"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forward_replaced_by_others():
    """C106: another library's forward, before ours or after it, wrapping or replacing it."""
    model = tiny.causal_lm("llama")
    theirs = loss_and_grads(model)
    calls = []

    def logged(inner, name):
        import functools

        @functools.wraps(inner)
        def forward(*args, **kwargs):
            calls.append(name)
            return inner(*args, **kwargs)

        return forward

    model.forward = logged(model.forward, "before")
    report = patch_model(model)
    assert any("had been replaced" in why for _, why in report.left)
    assert_same_run(loss_and_grads(model), theirs)
    assert calls == []
    model(input_ids=data()["input_ids"])
    assert calls == ["before"]
    model.forward = logged(model.forward, "after")
    assert not patch_model(model).replaced  # ours is still called, inside
    assert_same_run(loss_and_grads(model), theirs)
    assert calls == ["before", "after"]
    left = unpatch(model).left
    assert left == [("forward", "replaced by other code since")]
    del model.forward

    replacement = model.forward = lambda **kwargs: "theirs"
    patch_model(model, fused_linear_cross_entropy=False)
    assert model(**data()) == "theirs" and model.forward is replacement
    assert "LigerRMSNorm" in repr(model) and "LigerSwiGLUMLP" in repr(model)


def test_own_subclass():
    """A class of the user's own over a patched class: super().forward() ends in the original, not in itself."""

    class Mine(modeling_llama.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = Mine(tiny.config("llama"))
    ids = data()["input_ids"]
    expected = model(input_ids=ids).logits
    patch_classes("llama")
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert model.train()(**data()).logits is None
    patch_model(model)
    torch.testing.assert_close(model.eval()(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
    unpatch(model)


def test_copies_and_other_heads():
    """A deep copy runs and undoes on its own; backbones and classification heads get layers, no loss."""
    model = tiny.causal_lm("llama")
    theirs = loss_and_grads(model)
    patch_model(model)
    twin = copy.deepcopy(model)
    unpatch(model)
    with torch.no_grad():
        twin.model.norm.weight.mul_(1.5)
    assert not torch.equal(loss_and_grads(twin)[0].loss, theirs[0].loss)
    assert twin.forward.__self__ is twin and twin.model.norm.forward.__self__ is twin.model.norm
    unpatch(twin)
    assert not any("Liger" in kind for kind in kinds(twin))

    classifier = modeling_llama.LlamaForSequenceClassification(tiny.config("llama"))
    report = patch_model(classifier)
    assert ("loss", "LlamaForSequenceClassification has no language-model head that a table knows") in report.left
    assert "LigerRMSNorm" in repr(classifier)
    assert patch_model(tiny.causal_lm("llama").model).replaced


def test_accelerate_hooks_stay():
    """A module that accelerate hooked (device maps, offloading) keeps its hook around our forward."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    seen = []

    class Hook(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    model = tiny.causal_lm("llama")
    theirs = loss_and_grads(model)
    add_hook_to_module(model, Hook())
    add_hook_to_module(model.model.norm, Hook())
    patch_model(model)
    assert not patch_model(model).replaced
    run = loss_and_grads(model)
    assert run[0].logits is None and seen == ["LlamaForCausalLM", "LlamaRMSNorm"]
    assert_same_run(run, theirs)
    unpatch(model)
    assert loss_and_grads(model)[0].logits is not None


def test_dispatch_by_type(caplog, monkeypatch):
    """Unknown types are logged and left; arguments are filtered by whatever function is in the dict at that time."""
    caplog.set_level("INFO", logger="liger_kernel")
    for nothing in (None, "", "no_such_model"):
        monkey_patch._apply_liger_kernel(nothing)
    monkey_patch._apply_liger_kernel_to_instance(torch.nn.Linear(2, 2))
    assert len(caplog.records) == 4

    seen = []

    def mine(rope=True, model=None):
        seen.append((rope, model))

    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", mine)
    model = tiny.causal_lm("llama")
    monkey_patch._apply_liger_kernel("llama", rope=False, swiglu=True, unknown=1)
    monkey_patch._apply_liger_kernel_to_instance(model, swiglu=True)
    assert seen == [(False, None), (True, model)]


def test_signatures():
    parameters = ["rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "swiglu", "model"]
    defaults = [True, False, True, True, True, None]
    for name in MODELING:
        function = getattr(liger, f"apply_liger_kernel_to_{name}")
        signature = inspect.signature(function)
        assert list(signature.parameters) == parameters
        assert [p.default for p in signature.parameters.values()] == defaults
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in signature.parameters.values())
        assert function.__doc__ and function.__name__ == f"apply_liger_kernel_to_{name}"
        assert monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[name] is function


def test_missing_names_are_reported(monkeypatch):
    """C109: a class that the installed transformers lacks is skipped and named."""
    monkeypatch.delattr(modeling_llama, "LlamaMLP")
    report = patch_classes("llama")
    assert report.left == [("transformers.models.llama.modeling_llama.LlamaMLP", "not in the installed transformers")]
    unpatch()
    older = dataclasses.replace(rows()["llama"], modeling="no_such_model")
    report = patch_classes_by(older)
    assert not report.replaced and {why for _, why in report.left} == {"not in the installed transformers"} and len(report.left) == 4


def test_auto_class(tmp_path):
    """Flags go to the patch, the rest to transformers; other types are built as usual."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny.causal_lm("llama").save_pretrained(tmp_path / "llama")
    auto = liger.AutoLigerKernelForCausalLM
    model = auto.from_pretrained(tmp_path / "llama", torch_dtype=torch.bfloat16, swiglu=False)
    assert model.dtype == torch.bfloat16 and isinstance(model.model.norm, liger.LigerRMSNorm)
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert model.train()(**data()).logits is None
    unpatch()
    assert isinstance(auto.from_config(model.config, rms_norm=True).model.norm, liger.LigerRMSNorm)
    other = auto.from_config(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100))
    assert isinstance(other, GPT2LMHeadModel)
