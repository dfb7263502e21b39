"""Every row's modules and rotations, one by one, against the code that they replace; signatures and errors of its function."""

import copy
import dataclasses
import importlib
import inspect

import pytest
import torch

import liger_kernel.transformers as liger
from liger_kernel.patch import compare, modules, patch_classes, patch_model, tiny, unpatch
from liger_kernel.patch.engine import patch_classes_by, patch_model_by
from liger_kernel.patch.models import by_type, rows
from liger_kernel.transformers import monkey_patch

# One model type a row: the text model's, where the row has several.
TYPES = [row.types[0] if row.types else name for name, row in rows().items()]
U = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


def gradients(function, arguments, parameters):
    """(outputs, gradients of the floating arguments and of the parameters) for fixed upstream gradients."""
    leaves = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in arguments]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(3)
    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad] + parameters
    return [*outputs, *torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)]


def inputs(model):
    given = compare.inputs_for(model) if tiny.takes_pixels(model.config.model_type) else compare.inputs(length=9)
    return {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in given.items() if name != "labels"}


def assert_no_further(ours, theirs, truth, dtype, what):
    """Each tensor within twice the error of the code it replaces, plus a few roundings of its largest element."""
    for i, (a, b, c) in enumerate(zip(ours, theirs, truth, strict=True)):
        assert (a is None) == (b is None), what
        if a is not None:
            error, eager = (a.double() - c.double()).abs().max(), (b.double() - c.double()).abs().max()
            assert error <= 2 * eager + 16 * U[dtype] * c.double().abs().max(), (what, i, error.item(), eager.item())


@pytest.mark.parametrize("dtype", U, ids=str)
@pytest.mark.parametrize("model_type", TYPES)
def test_modules(model_type, dtype):
    """The hidden states are random, of the shape that the module gets in its model; experts get the model's own routing too."""
    row = by_type()[model_type]
    model = tiny.causal_lm(model_type).to(dtype)
    patched = copy.deepcopy(model)
    report = patch_model_by(row, patched, **compare.everything(row))
    replaced = {where for where, _, now in report.replaced if now.startswith("Liger")}
    shapes, given = {}, inputs(model)
    for name, module in model.named_modules():
        if name in replaced:
            module.register_forward_pre_hook(lambda m, args, name=name: shapes.update({name: (args[0].shape, args[0].dtype, args[1:])}))
    model(**given)
    names = sorted(replaced & shapes.keys())
    assert len(names) >= 2 * len({type(model.get_submodule(n)).__name__ for n in names}), "a row has replaced too little"
    norms = {name for name, _, now in report.replaced if "Norm" in now}
    for name in names:
        theirs, ours = model.get_submodule(name), patched.get_submodule(name)
        theirs._forward_pre_hooks.clear()
        x = 2 * torch.randn(shapes[name][0], generator=torch.Generator().manual_seed(1)).to(shapes[name][1])
        routing = [a.detach() for a in shapes[name][2]]
        wide = copy.deepcopy(theirs).float()
        results = [gradients(m, [x.to(d), *(a.to(torch.promote_types(a.dtype, d)) if a.is_floating_point() else a for a in routing)],
                             list(m.parameters())) for m, d in ((ours, x.dtype), (theirs, x.dtype), (wide, torch.float32))]
        assert (name in norms) == hasattr(ours, "variance_epsilon")
        assert_no_further(*results, x.dtype, f"{model_type} {name} ({type(theirs).__name__})")
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in patched.named_parameters()}


@pytest.mark.parametrize("dtype", U, ids=str)
@pytest.mark.parametrize("model_type", [t for t in TYPES if by_type()[t].ropes])
def test_rotations(model_type, dtype, monkeypatch):
    """The arguments are those of the model's own calls."""
    row = by_type()[model_type]
    modeling = importlib.import_module(row.module)
    model = tiny.causal_lm(model_type).to(dtype)
    calls = []
    for name in row.ropes:
        function = getattr(modeling, name)

        def recorded(*args, function=function, name=name, **kwargs):
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            tensors = [value for value in given.values() if torch.is_tensor(value)]
            calls.append((name, function, tensors, {k: value for k, value in given.items() if not torch.is_tensor(value)}))
            return function(*args, **kwargs)

        monkeypatch.setattr(modeling, name, recorded)
    model(**inputs(model))
    monkeypatch.undo()
    assert calls, "no rotation was called"
    for name, function, args, kwargs in (call for name in row.ropes for call in [c for c in calls if c[0] == name][:2]):
        tensors = 1 if row.ropes[name].name.endswith("_one") else 2
        heads, rest = [a.detach() for a in args[:tensors]], [a.detach() for a in args[tensors:]]
        replacement = row.ropes[name].load()

        def results(f, dtype, heads=heads, rest=rest, kwargs=kwargs):
            table = [t.to(torch.promote_types(t.dtype, dtype)) for t in rest]
            return gradients(lambda *h: f(*h, *table, **kwargs), [h.to(dtype) for h in heads], [])

        three = results(replacement, dtype), results(function, dtype), results(function, torch.float32)
        assert_no_further(*three, dtype, f"{model_type} {name}")


C = "cross_entropy=False, fused_linear_cross_entropy=True"
S = f"(rope=True, {C}, rms_norm=True, swiglu=True, model=None)"
G = f"(rope=True, {C}, rms_norm=True, geglu=True, model=None)"
SIGNATURES = {
    S: "llama smollm3 mistral ministral mixtral qwen2 qwen3 qwen3_moe phi3 olmo2 olmo3 falcon_h1 hunyuan_v1_dense hunyuan_v1_moe exaone4 "
       "qwen2_5_vl qwen2_5_vl_text qwen3_vl_moe qwen3_vl_moe_text qwen2_moe olmoe glm4_moe",
    S.replace("cross_entropy=False, fused_linear_cross_entropy=True", "cross_entropy=True, fused_linear_cross_entropy=False"): "granite",
    S.replace("swiglu=True", "swiglu=False"): "gpt_oss qwen3_vl qwen3_vl_text",
    S.replace("rope=True", "rope=False"): "glm4 glm4v glm4v_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text "
                                           "deepseek_v2 deepseek_v3",
    S.replace("rope=True", "rope=False").replace("swiglu=True", "swiglu=False"): "deepseek_v4",
    G: "gemma gemma2 gemma3_text",
    G.replace("rope=True", "rope=False"): "gemma4_text",
    f"(rope=True, {C}, rms_norm=True, swiglu=True, model=None, layer_norm=True)": "llama4 llama4_text",
    f"(relu_squared=True, {C}, model=None, **kwargs)": "nemotron",
    f"(rope=True, {C}, layer_norm=True, rms_norm=True, swiglu=True, model=None)": "muse_glimmer mllama mllama_text_model",
    f"(rope=True, {C}, layer_norm=True, rms_norm=True, geglu=True, model=None)": "gemma3 paligemma",
    f"(rope=False, {C}, layer_norm=False, rms_norm=True, geglu=True, model=None)": "gemma4",
    f"(rope=True, {C}, rms_norm=True, layer_norm=True, swiglu=True, model=None)": "qwen2_vl qwen2_vl_text",
    "(rope=True, rms_norm=True, swiglu=True, model=None)": "pixtral",
    f"({C}, model=None, **kwargs)": "llava",
    f"({C}, rms_norm=True, layer_norm=True, model=None, **kwargs)": "internvl smolvlm",
}


def test_signatures():
    """Trainers look at parameter names, order and defaults."""
    for signature, names in SIGNATURES.items():
        for name in names.split():
            function = getattr(liger, f"apply_liger_kernel_to_{name}")
            assert str(inspect.signature(function)) == signature, name
            assert function is monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[name]
    functions = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    more = {"gemma3_text", "gemma4_text", "glm4v_text", "glm4v_moe_text", "muse_glimmer_text"}
    assert set(functions) == more | {name for names in SIGNATURES.values() for name in names.split()}
    assert functions["llama4_text"] is functions["llama4"] and functions["gemma3_text"] is liger.apply_liger_kernel_to_gemma3_text
    for function in set(functions.values()) - {functions["pixtral"]}:
        with pytest.raises(AssertionError, match="cannot both be True"):
            function(cross_entropy=True, fused_linear_cross_entropy=True)


@pytest.mark.parametrize("name", rows())
def test_every_row_hits(name):
    """C109: all that a row names exists in the installed transformers, replaced or left; every patch can be taken back."""
    row = rows()[name]
    modeling = importlib.import_module(row.module)
    before = {k: v for k, v in vars(modeling).items() if not k.startswith("__")}
    classes = {k: dict(vars(v)) for k, v in before.items() if inspect.isclass(v) and v.__module__ == modeling.__name__}
    report = patch_classes_by(row, **compare.everything(row))
    assert not [where for where, why in report.left if "installed transformers" in why]
    names = {where.rpartition(".")[2] for where, _, _ in report.replaced}
    parts = (row, *(rows()[part] for part in row.parts))
    assert names == {*row.heads, *(found for part in parts for found in (*part.layers, *part.ropes))}
    assert {where for where, _ in report.left} | {"LayerNorm"} >= {n for n in row.left if inspect.isclass(getattr(modeling, n, None))}
    assert all(hasattr(modeling, n) for n in row.left if n != "LayerNorm"), "a left name is gone"
    assert all(hasattr(modeling, n) for n in row.accepts)
    unpatch(name)
    assert {k: v for k, v in vars(modeling).items() if not k.startswith("__")} == before
    for k, attributes in classes.items():
        assert dict(vars(before[k])) == attributes, k


@pytest.mark.parametrize("model_type, error", [
    ("gemma3_text", TypeError), ("gemma4_text", TypeError), ("qwen3_next", TypeError), ("qwen3_5", TypeError), ("qwen3_5_moe", TypeError),
    ("llama4", ValueError), ("muse_glimmer", TypeError), ("gemma3", TypeError), ("gemma4", TypeError), ("paligemma", TypeError),
    ("qwen2_vl", TypeError), ("qwen2_5_vl", TypeError), ("qwen3_vl", TypeError), ("qwen3_vl_moe", TypeError), ("glm4v", TypeError),
    ("glm4v_moe", TypeError), ("mllama", ValueError), ("pixtral", ValueError), ("internvl", TypeError), ("smolvlm", TypeError),
])
def test_wrong_model(model_type, error):
    model = tiny.causal_lm("llama")
    with pytest.raises(error, match=f"apply_liger_kernel_to_{model_type}.* got a LlamaForCausalLM; it takes "):
        getattr(liger, f"apply_liger_kernel_to_{model_type}")(model=model)
    assert "Liger" not in repr(model)


def test_flags_without_effect(caplog):
    """Asking for what a row cannot do is one warning; its default is not."""
    for name, flag in (("deepseek_v4", "rope"), ("deepseek_v4", "swiglu"), ("gpt_oss", "swiglu")):
        function = getattr(liger, f"apply_liger_kernel_to_{name}")
        caplog.clear()
        function()
        assert not caplog.records
        function(**{flag: True})
        assert [f"{flag}=True has no effect on {name}" in r.getMessage() for r in caplog.records] == [True]
    liger.apply_liger_kernel_to_nemotron(rope=True, unknown=1)


def test_rotation_of_rows_where_it_is_off():
    """glm4, qwen3_next, qwen3_5, deepseek_v3, gemma4: rope=True works."""
    for name in ("glm4", "qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "gemma4_text"):
        assert not [w for w, *_ in patch_classes(name).replaced if "rotary" in w]
        assert [w for w, *_ in patch_classes(name, rope=True).replaced if "rotary" in w]


def test_casting_mode_of_installed_class():
    """DeepSeek-V4's norm rounds first in transformers 5.17 and last in 5.24; the class itself is asked."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    assert (modules.casting_mode_of(LlamaRMSNorm), modules.casting_mode_of(Olmo2RMSNorm)) == ("llama", "gemma")
    norm = DeepseekV4RMSNorm(64)
    model = tiny.causal_lm("deepseek_v4")
    patch_model(model)
    assert model.model.norm.casting_mode == modules.casting_mode_of(type(norm))


def test_weightless_norms():
    """Norms without a weight run on our op, on both levels, and print."""
    from transformers.models.gemma4 import modeling_gemma4

    norms = [modeling_gemma4.Gemma4RMSNorm(16, with_scale=scale) for scale in (True, False)]
    x = torch.randn(3, 16)
    expected = [norm(x) for norm in norms]
    patch_classes("gemma4_text")
    norms += [modeling_gemma4.Gemma4RMSNorm(16, with_scale=scale) for scale in (True, False)]
    assert all("LigerRMSNormForGemma4" in repr(norm) for norm in norms)
    for norm, y in zip(norms, expected * 2, strict=True):
        torch.testing.assert_close(norm(x), y)
    assert len(list(norms[1].parameters())) == len(list(norms[3].parameters())) == 0


def test_row_with_parts():
    """A row of a composite model reaches the layers and rotations of its parts, and leaves their heads."""
    modeling = importlib.import_module(rows()["qwen2"].module)
    row = dataclasses.replace(rows()["llama"], name="composite", modeling="llama", parts=("qwen2",))
    report = patch_classes_by(row, rms_norm=False)
    names = [where.rpartition(".")[2] for where, *_ in report.replaced]
    assert names == ["apply_rotary_pos_emb", "LlamaMLP", "apply_rotary_pos_emb", "Qwen2MLP", "LlamaForCausalLM"]
    assert ("Qwen2RMSNorm", "rms_norm is off") in report.left
    model = tiny.causal_lm("llama")
    unpatch()
    patch_model_by(row, model)
    assert modeling.apply_rotary_pos_emb is liger.liger_rotary_pos_emb
    unpatch(model)
    assert modeling.apply_rotary_pos_emb is not liger.liger_rotary_pos_emb
