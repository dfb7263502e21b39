"""Models without a row, by structure: what is the same is replaced, what is not stays."""

import copy
import inspect
import pickle

import pytest
import torch

from liger_kernel.patch import compare, modules, patch_model, structure, tiny, unpatch
from liger_kernel.patch.models import by_type
from liger_kernel.patch.specs import GatedNorm, Norm
from liger_kernel.transformers import monkey_patch

CHANGES = {
    "dots1": dict(head_dim=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=48, n_group=1,
                  topk_group=1, first_k_dense_replace=1),
    "seed_oss": dict(head_dim=16, residual_dropout=0.0, attention_dropout=0.0),
    "cohere": {}, "ernie4_5": {}, "helium": dict(head_dim=16), "starcoder2": {},
    "flex_olmo": dict(num_experts=4, num_experts_per_tok=2), "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2),
}
# (casting mode of the norms or None, gated MLPs and experts, rotation, whether the loss is fused)
FOUND = {
    "dots1": ("llama", "LigerExperts LigerSwiGLUMLP", "liger_rotary_pos_emb", True),
    "seed_oss": ("llama", "LigerSwiGLUMLP", "liger_rotary_pos_emb", True),
    "cohere": (None, "LigerSwiGLUMLP", "liger_rotary_pos_emb_interleaved_table", False),  # centred norms, scaled logits
    "ernie4_5": ("llama", "LigerSwiGLUMLP", "liger_rotary_pos_emb_interleaved", True),
    "helium": ("gemma", "LigerSwiGLUMLP", "liger_rotary_pos_emb_interleaved", True),
    "flex_olmo": ("gemma", "LigerExperts", "liger_rotary_pos_emb", True),
    "granitemoe": ("llama", "LigerExperts", "liger_rotary_pos_emb", False),  # scaled logits
    "starcoder2": (None, None, "liger_rotary_pos_emb", True),  # no gate
}


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


@pytest.mark.parametrize("model_type", FOUND)
def test_found(model_type):
    """None of these types has a row; the row that their classes amount to, and fp32 logits, loss and gradients with it."""
    assert model_type not in by_type()
    plain = tiny.causal_lm(model_type, **CHANGES[model_type])
    casting_mode, mlp, rope, head = FOUND[model_type]
    row = structure.row_of(plain)
    assert {spec.casting_mode for spec in row.norms.values()} == ({casting_mode} if casting_mode else set())
    assert sorted({spec.replacement.name for spec in row.mlps.values()}) == (mlp or "").split()
    assert [replacement.name for replacement in row.ropes.values()] == [rope] and bool(row.heads) == head
    model = copy.deepcopy(plain)
    theirs = compare.run(plain)
    report = structure.patch_unknown(model)
    assert [w for _, _, w in report.replaced if "rotary" in w] and ("unknown" in str(report)) == head
    d = compare.distance(compare.run(model), theirs)
    assert d.logits <= 1e-5 and d.loss <= 1e-5 and d.gradients <= 5e-5, d
    if head:
        assert model(**compare.inputs()).logits is None
    assert not structure.patch_unknown(model).replaced
    unpatch(model)
    assert "Liger" not in repr(model) and torch.equal(compare.run(model).logits, theirs.logits)


@pytest.mark.parametrize("name, like", [
    ("llama", ("llama", 0.0)), ("olmo2", ("gemma", 0.0)), ("gpt_oss", ("gemma", 0.0)), ("gemma2", ("gemma", 1.0)),
    ("qwen3_next", ("gemma", 1.0)),
])
def test_agrees_with_the_tables(name, like):
    """On families that have a row, the probe finds what the row says."""
    model, row = tiny.causal_lm(name), by_type()[name]
    found = structure.row_of(model)
    assert found.norms and {(spec.casting_mode, spec.offset) for spec in found.norms.values() if isinstance(spec, Norm)} == {like}
    assert all(spec == row.norms[name] for name, spec in found.norms.items() if isinstance(spec, GatedNorm))
    assert set(found.norms) <= set(row.norms)
    assert {n: spec.replacement.load().forward for n, spec in found.mlps.items()}.keys() <= row.mlps.keys()
    assert found.ropes in ({}, row.ropes)


@pytest.mark.parametrize("name, options, found", [
    ("mamba2.MambaRMSNormGated", {}, (False, "llama")), ("kimi_linear.KimiLinearRMSNormGated", {}, (True, "gemma")),
    ("zamba2.Zamba2RMSNormGated", dict(group_size=16), (False, "llama")), ("olmo_hybrid.OlmoHybridRMSNormGated", {}, (True, "llama")),
    ("qwen4_exp.Qwen4ExpTextRMSNormGated", dict(activation="sigmoid"), (True, "llama")),
])
def test_gated_norms(name, options, found):
    """Either order, groups, the module's own activation; another activation is none of ours."""
    home, _, cls = name.partition(".")
    cls = getattr(pytest.importorskip(f"transformers.models.{home}.modeling_{home}"), cls)
    if "group_size" in inspect.signature(cls).parameters:
        options = {"group_size": 64, **options}
    module, x, gate = cls(64, eps=1e-5, **options), torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    spec, want = structure._gated_norm_of(module), module(x, gate)
    assert (spec.norm_before_gate, spec.casting_mode) == found and modules.mismatch(spec, module) is None
    assert modules.patch_layer(spec, module) and not modules.patch_layer(spec, module)
    torch.testing.assert_close(module(x, gate), want)
    if hasattr(module, "activation"):
        other = cls(64, **options)
        other.activation = "gelu"
        assert structure._gated_norm_of(other) is None and modules.mismatch(spec, other)


def test_nothing_alike():
    """An MLP with multipliers, a norm with another rule: left."""
    falcon = structure.row_of(tiny.causal_lm("falcon_h1"))
    assert not falcon.mlps and not falcon.heads
    blt = __import__("transformers.models.blt.modeling_blt", fromlist=["x"])
    assert structure._rope_of(blt.apply_rotary_pos_emb) != structure._ROPES[0]  # H's text over another rotate_half

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.variance_epsilon)

    assert structure._norm_of(Odd()) is None


def test_layers_that_differ():
    """A class of which one module computes something else is left; so are gates that clamp large numbers alone."""
    model = tiny.causal_lm("dots1", **CHANGES["dots1"])
    model.model.layers[0].mlp.act_fn = torch.nn.GELU("tanh")
    assert set(structure.row_of(model).mlps) == {"Dots1Experts"}
    experts = model.model.layers[1].mlp.experts
    assert structure._experts_of(experts) and not structure._mlp_of(experts) and not structure._norm_of(experts)

    class Clamped(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.silu(x).clamp(max=20)

    experts.act_fn = Clamped()
    assert not structure._experts_of(experts)
    mlp = model.model.layers[1].mlp.shared_experts
    assert structure._mlp_of(mlp)
    mlp.act_fn = Clamped()
    assert not structure._mlp_of(mlp)
    left = tiny.causal_lm("deepseek_v4")
    assert not any(structure._experts_of(m) or structure._mlp_of(m) for m in left.modules())  # clamped at 10


def test_bf16_experts():
    """Against the fp32 model of the same weights, no worse than twice the unpatched bf16 model; every token goes to every expert."""
    plain = tiny.causal_lm("dots1", **{**CHANGES["dots1"], "num_experts_per_tok": 4}).bfloat16()
    theirs, truth = compare.run(plain), compare.run(copy.deepcopy(plain).float())
    structure.patch_unknown(plain)
    ours, eager = compare.distance(compare.run(plain), truth), compare.distance(theirs, truth)
    assert ours.logits <= 2 * eager.logits + 2**-8 and ours.gradients <= 2 * eager.gradients + 2**-8, (ours, eager)


def test_bf16_and_evaluation():
    """Probes are the same for a bf16 model in evaluation mode; their inputs are their own."""
    model = tiny.causal_lm("helium", **CHANGES["helium"]).bfloat16().eval()
    state = copy.deepcopy(model.state_dict())
    assert structure.row_of(model).norms == structure.row_of(model.float().train()).norms
    assert all(torch.equal(a, b) for a, b in zip(model.bfloat16().state_dict().values(), state.values(), strict=True))


def test_flags_and_dispatch():
    """Flags as everywhere; the function may be entered into the table, which both dispatchers look at."""
    model = tiny.causal_lm("ernie4_5")
    report = structure.patch_unknown(model, rope=False, swiglu=False, fused_linear_cross_entropy=False)
    assert {now for *_, now in report.replaced} == {"LigerRMSNorm"}
    unpatch(model)
    with pytest.raises(AssertionError):
        structure.patch_unknown(model, cross_entropy=True)
    with pytest.raises(ValueError, match="no row for model type 'ernie4_5'"):
        patch_model(model)
    table = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    table["ernie4_5"] = structure.apply_liger_kernel_to_unknown
    try:
        monkey_patch._apply_liger_kernel_to_instance(model, swiglu=False, use_reentrant=True)
        assert "LigerRMSNorm" in repr(model) and "LigerSwiGLUMLP" not in repr(model)
        with pytest.raises(ValueError, match="needs the model"):
            monkey_patch._apply_liger_kernel("ernie4_5")
    finally:
        del table["ernie4_5"]


def test_forward_can_be_found_again():
    """A patched head's forward has a module and a name, as pickling needs."""
    model = tiny.causal_lm("ernie4_5")
    structure.patch_unknown(model)
    function = model.forward.__func__
    assert pickle.loads(pickle.dumps(function)) is function
    from liger_kernel.transformers.model import unknown

    with pytest.raises(AttributeError):
        unknown.cohere__CohereForCausalLM  # noqa: B018


def test_known_types_go_by_their_rows():
    model = tiny.causal_lm("llama")
    assert "llama.lce_forward" in str(structure.patch_unknown(model))
