"""Decoder layers with their addition and norm in one op."""

import copy
import pickle

import pytest
import torch

import liger_kernel.transformers as liger
from liger_kernel.ops import fused_add_rms_norm as op
from liger_kernel.patch import compare, patch_classes, patch_model, tiny, unpatch
from liger_kernel.patch.models import by_type
from liger_kernel.patch.residual import fused_forward

STANDARD = ["llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "mixtral", "qwen3_moe", "hunyuan_v1_dense", "hunyuan_v1_moe",
            "deepseek_v2", "deepseek_v3", "gemma"]
OTHERS = ["granite", "phi3", "gpt_oss", "gemma2", "glm4", "nemotron", "llama4_text"]


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


@pytest.fixture
def calls(monkeypatch):
    """Counts calls of the op."""
    seen, apply = [], op.LigerFusedAddRMSNormFunction.apply
    monkeypatch.setattr(op.LigerFusedAddRMSNormFunction, "apply", lambda *a: (seen.append(1), apply(*a))[1])
    return seen


@pytest.mark.parametrize("patched", [False, True], ids=["alone", "patched"])
@pytest.mark.parametrize("kind", STANDARD)
def test_standard_layers(kind, patched, calls):
    """Every layer is taken; in fp32 the numbers of the unpatched model, in bf16 no further from the truth; undone, nothing is left."""
    plain = tiny.causal_lm(kind, **compare.all_experts(by_type()[kind]))
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(plain).to(dtype)
        if patched:
            patch_model(model)
        report = liger.fuse_residual_norms(model)
        assert not report.left and len(report.replaced) == len(model.model.layers)
        if patched:
            assert not patch_model(model).replaced
        calls.clear()
        ours = compare.run(model)
        assert len(calls) >= len(model.model.layers)
        again = liger.fuse_residual_norms(model)
        assert not again.replaced and len(again.already) == len(report.replaced)
        unpatch(model)
        assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in plain.modules()]
        theirs, truth = compare.run(model), compare.run(copy.deepcopy(model).float())
        far, eager = compare.distance(ours, truth), compare.distance(theirs, truth)
        for what in ("logits", "loss", "gradients"):
            assert getattr(far, what) <= 2 * getattr(eager, what) + (2e-5 if dtype == torch.float32 else 2**-8), (kind, dtype, what)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers(kind):
    model = tiny.causal_lm(kind)
    report = liger.fuse_residual_norms(model)
    assert not report.replaced and len(report.left) == 2 and all("has another form" in why for _, why in report.left)


def test_other_norms():
    model = tiny.causal_lm("llama")
    model.model.layers[1].post_attention_layernorm = torch.nn.LayerNorm(64)
    assert liger.fuse_residual_norms(model).left == [("model.layers.1", "its norm is a LayerNorm, no RMSNorm with a weight")]


def test_one_rounding():
    """A bf16 layer's output differs from the unfused one by roundings of the norm alone: nowhere by more than two units of it."""
    model = tiny.causal_lm("llama").bfloat16().model
    layer, x = model.layers[0], torch.randn(2, 9, 64).bfloat16()
    positions = model.rotary_emb(x, torch.arange(9)[None])
    expected = layer(x, position_embeddings=positions)
    liger.fuse_residual_norms(model)
    assert layer.forward.__func__ is fused_forward
    difference = (layer(x, position_embeddings=positions).float() - expected.float()).abs()
    assert difference.max() <= 2**-7 * expected.abs().max() and (difference > 0).float().mean() < 0.2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, calls):
    """Each layer runs again in backward; the gradients are the same, with a cache asked for too."""
    plain = tiny.causal_lm("llama")
    model = copy.deepcopy(plain)
    patch_model(model), liger.fuse_residual_norms(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    far = compare.distance(compare.run(model, **compare.inputs()), compare.run(plain, **compare.inputs()))
    assert max(far.logits, far.loss, far.gradients) < 2e-5
    calls.clear()
    model(**compare.inputs(), use_cache=True).loss.backward()
    assert len(calls) == 2 * len(model.model.layers)
    calls.clear()
    model.eval()(**compare.inputs())
    assert len(calls) == len(model.model.layers)


def test_cache(calls):
    """Generation token by token."""
    model = tiny.causal_lm("qwen2").eval()
    ids = compare.inputs()["input_ids"][:2, :6]
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    expected = model.generate(ids, **given)
    liger.fuse_residual_norms(model)
    assert torch.equal(model.generate(ids, **given), expected)
    assert len(calls) == 6 * len(model.model.layers)


def test_what_hangs_on_the_norm_runs(calls):
    """Hooks, a replaced forward, accelerate: that layer is computed as transformers does."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = tiny.causal_lm("llama")
    liger.fuse_residual_norms(model)
    first, second = (layer.post_attention_layernorm for layer in model.model.layers)
    seen = []
    handle = first.register_forward_hook(lambda *a: seen.append("hook"))
    second.forward = lambda x: (seen.append("forward"), type(second).forward(second, x))[1]
    model(**compare.inputs())
    assert seen == ["hook", "forward"] and not calls
    handle.remove()
    del second.forward
    model(**compare.inputs())
    assert len(calls) == 2
    add_hook_to_module(first, ModelHook())
    model(**compare.inputs())
    assert len(calls) == 3


def test_class_level_pickle_and_others():
    """After a class-level patch; through pickle; a layer whose forward others have replaced stays."""
    plain = tiny.causal_lm("llama")
    theirs = compare.run(plain)
    patch_classes("llama")
    model = tiny.causal_lm("llama")
    model.load_state_dict(plain.state_dict())
    assert len(liger.fuse_residual_norms(model).replaced) == 2
    for m in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert all(layer.forward.__self__ is layer for layer in m.model.layers)
        far = compare.distance(compare.run(m), theirs)
        assert max(far.logits, far.loss, far.gradients) < 2e-5
    other = tiny.causal_lm("llama")
    other.model.layers[0].forward = lambda x, **kwargs: x
    report = liger.fuse_residual_norms(other)
    assert report.left == [("model.layers.0", "its forward has been replaced by other code")] and len(report.replaced) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compile(checkpointing):
    if checkpointing and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip("torch 2.11 breaks the graph at the checkpointed layer")
    torch._dynamo.reset()
    plain = tiny.causal_lm("llama", num_hidden_layers=1)
    model = copy.deepcopy(plain).train()
    patch_model(model), liger.fuse_residual_norms(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    given = dict(compare.inputs(), use_cache=False)
    expected = compare.run(plain)
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(**given)
    out.loss.backward()
    torch.testing.assert_close(out.loss.double(), expected.loss, rtol=1e-5, atol=0)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected.gradients[name]).abs().max() <= 5e-5 * expected.gradients[name].abs().max(), name
