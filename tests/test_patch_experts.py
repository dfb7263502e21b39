"""Experts of mixtures: which are replaced, by which flag, and that they compute what transformers' implementations do."""

import copy
import importlib

import pytest
import torch

from liger_kernel.patch import compare, patch_classes, patch_model, tiny, unpatch
from liger_kernel.patch.models import by_type, rows
from liger_kernel.transformers import LigerExperts

pytest.importorskip("transformers", "5.0")

# model type -> its class of experts
REPLACED = {
    "mixtral": "MixtralExperts", "qwen3_moe": "Qwen3MoeExperts", "hunyuan_v1_moe": "HunYuanMoEV1Experts", "qwen3_next": "Qwen3NextExperts",
    "qwen3_5_moe_text": "Qwen3_5MoeExperts", "qwen3_vl_moe_text": "Qwen3VLMoeTextExperts", "glm4v_moe_text": "Glm4vMoeTextExperts",
    "deepseek_v2": "DeepseekV2Experts", "deepseek_v3": "DeepseekV3Experts", "qwen2_moe": "Qwen2MoeExperts", "olmoe": "OlmoeExperts",
    "glm4_moe": "Glm4MoeExperts",
}
LEFT = {
    "gpt_oss": "GptOssExperts", "deepseek_v4": "DeepseekV4Experts", "gemma4_text": "Gemma4TextExperts", "llama4_text": "Llama4TextExperts",
}


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


def experts_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Experts")]


def experts_class(model_type):
    return getattr(importlib.import_module(by_type()[model_type].module), REPLACED[model_type])


def test_every_class_of_experts_has_a_row():
    """Replaced or left with a reason, in every modelling module that a row names."""
    for row in rows().values():
        modeling = importlib.import_module(row.module)
        found = {name for name, value in vars(modeling).items() if name.endswith("Experts") and isinstance(value, type)}
        assert found <= row.mlps.keys() | row.left.keys(), row.name
        assert found & row.mlps.keys() <= set(REPLACED.values()) and found & row.left.keys() <= set(LEFT.values())


@pytest.mark.parametrize("model_type", REPLACED)
def test_replaced(model_type):
    """By swiglu alone, on the instance alone; the report names them; undone, nothing of ours is left."""
    model, other = tiny.causal_lm(model_type), tiny.causal_lm(model_type)
    off = dict.fromkeys(compare.everything(by_type()[model_type]), False)
    report = patch_model(model, **off)
    assert not report.replaced and any("swiglu is off" in why for where, why in report.left if where.endswith("experts"))
    report = patch_model(model, **{**off, "swiglu": True})
    assert [was for where, was, now in report.replaced if now == "LigerExperts"] == [REPLACED[model_type]] * len(experts_of(model))
    for module in experts_of(model):
        assert module.forward.__func__ is LigerExperts.forward and module._get_name() == "LigerExperts"
        assert type(module).__name__ == REPLACED[model_type]
    assert all("forward" not in module.__dict__ for module in experts_of(other))
    unpatch(model)
    assert all("forward" not in module.__dict__ for module in experts_of(model)) and "LigerExperts" not in repr(model)


@pytest.mark.parametrize("model_type", LEFT)
def test_left(model_type):
    """Experts that compute something else stay as they are, and the report says why."""
    model = tiny.causal_lm(model_type)
    report = patch_model(model, **compare.everything(by_type()[model_type]))
    reasons = [why for where, why in report.left if where.endswith(".experts")]
    assert reasons and all(why.startswith(LEFT[model_type] + ": ") and len(why) > len(LEFT[model_type]) + 10 for why in reasons)
    assert all("forward" not in module.__dict__ for module in experts_of(model))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_against_every_implementation(model_type, implementation):
    """Loss and every gradient of a step, the experts' replaced alone."""
    plain = tiny.causal_lm(model_type).train()
    plain.set_experts_implementation(implementation)
    patched = copy.deepcopy(plain)
    patch_model(patched, **{**dict.fromkeys(compare.everything(by_type()[model_type]), False), "swiglu": True})
    d = compare.distance(compare.run(patched), compare.run(plain))
    assert d.logits <= 1e-5 and d.loss <= 1e-5 and d.gradients <= 5e-5, d


@pytest.mark.parametrize("model_type", REPLACED)
def test_at_class_level(model_type):
    """Modules of transformers' class get our forward, those built later are ours; both go back."""
    cls, existing = experts_class(model_type), tiny.causal_lm(model_type)
    plain = compare.run(copy.deepcopy(existing))
    patch_classes(by_type()[model_type].name, **{**dict.fromkeys(compare.everything(by_type()[model_type]), False), "swiglu": True})
    d = compare.distance(compare.run(existing), plain)
    assert d.logits <= 1e-5 and d.gradients <= 5e-5, d
    assert experts_class(model_type) is LigerExperts
    later = tiny.causal_lm(model_type)
    assert all(type(m) is LigerExperts for m in experts_of(later)) and experts_of(later)
    for mine, theirs in zip(experts_of(later), experts_of(existing), strict=True):
        assert {n: p.shape for n, p in mine.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
        for mine_p, theirs_p in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert 0.5 < mine_p.std() / theirs_p.std() < 2  # the model initialises them as it does its own
    unpatch()
    assert experts_class(model_type) is cls


def test_dense_and_sparse_layers():
    """C83: layers of one model differ; each is replaced by its own kind."""
    plain = tiny.causal_lm("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 2]).train()
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    kinds = [now for where, was, now in report.replaced if ".mlp" in where]
    assert kinds == ["LigerQwen3MoeSwiGLUMLP", "LigerExperts"] * 2
    assert compare.distance(compare.run(patched), compare.run(plain)).logits <= 1e-5


@pytest.mark.parametrize("patch", [patch_model, lambda model, **flags: patch_classes("mixtral", **flags)], ids=["instance", "class"])
def test_another_activation_is_left(patch):
    plain = tiny.causal_lm("mixtral", hidden_act="gelu").train()
    model = copy.deepcopy(plain)
    report = patch(model, rope=False, rms_norm=False, fused_linear_cross_entropy=False)
    if patch is patch_model:
        assert ("its activation is GELUActivation, not silu") in [why for _, why in report.left]
    ours, theirs = compare.run(model), compare.run(plain)
    assert torch.equal(ours.logits, theirs.logits) and all(torch.equal(g, theirs.gradients[n]) for n, g in ours.gradients.items())


def test_choices_of_other_ranks():
    """Under expert parallelism an index of num_experts means another rank's expert: no contribution, no gradient of its weight."""
    model = tiny.causal_lm("mixtral")
    module = experts_of(model)[0]
    theirs = copy.deepcopy(module)
    patch_model(model)
    theirs._is_expert_parallel = True
    x, weights = torch.randn(9, module.hidden_dim), torch.rand(9, 2)
    index = torch.randint(0, module.num_experts + 1, (9, 2))
    weights = weights.masked_fill(index == module.num_experts, 0)  # as transformers does
    results = []
    for experts in (module, theirs):
        leaves = [t.clone().requires_grad_() for t in (x, weights)]
        out = experts(leaves[0], index, leaves[1])
        results.append((out, *torch.autograd.grad(out.sum(), [*leaves, *experts.parameters()])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_adapted_weights_are_read_at_call_time():
    """A parametrised projection, as PEFT makes of experts' parameters it adapts: the forward sees the adapted one."""
    model = tiny.causal_lm("mixtral")
    module = experts_of(model)[0]
    patch_model(model)

    class Double(torch.nn.Module):
        def forward(self, w):
            return 2 * w

    x, index, weights = torch.randn(4, module.hidden_dim), torch.randint(0, module.num_experts, (4, 2)), torch.rand(4, 2)
    before = module(x, index, weights)
    torch.nn.utils.parametrize.register_parametrization(module, "down_proj", Double())
    torch.testing.assert_close(module(x, index, weights), 2 * before)
