"""LayerNorm, LayerNorm1P, squared ReLU and complex rotations in patched models, on both levels; norms fused with additions."""

import copy
import importlib

import pytest
import torch

import liger_kernel.transformers as liger
from liger_kernel.patch import compare, modules, patch_classes, patch_model, tiny, unpatch
from liger_kernel.patch.specs import LayerNorm
from liger_kernel.transformers import monkey_patch


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


class Holder(torch.nn.Module):
    """Something with LayerNorms in it, of a type whose function has the option layer_norm."""

    def __init__(self, **options):
        super().__init__()
        self.config = tiny.config("llama4_text")
        self.norm = torch.nn.LayerNorm(48, eps=1e-3, **options)
        self.image = torch.nn.LayerNorm((4, 12))


Holder.__name__ = "Llama4TextModel"  # what the function takes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_layer_norm(options, dtype):
    """C84: the contract of patched LayerNorms; those over several dimensions stay, and torch.nn.LayerNorm of the process does."""
    torch_class, torch_forward = torch.nn.LayerNorm, torch.nn.LayerNorm.forward
    model = Holder(**options).to(dtype)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    x = (5 + torch.randn(7, 48)).to(dtype)
    truth = copy.deepcopy(model.norm).double()(x.double())
    expected, plain = model.norm(x), copy.deepcopy(model)
    report = patch_model(model)
    norm = model.norm
    assert ("norm", "LayerNorm", "LigerLayerNorm") in report.replaced
    assert ("image", "it normalises 2 dimensions together") in report.left
    assert norm.forward.__func__ is liger.LigerLayerNorm.forward and norm.extra_repr.__func__ is liger.LigerLayerNorm.extra_repr
    assert norm._get_name() == "LigerLayerNorm" and type(norm) is torch.nn.LayerNorm and "LigerLayerNorm" in repr(model)
    assert (norm.variance_epsilon, norm.hidden_size, norm.impl, norm.mode) == (1e-3, (48,), None, None)
    error, theirs = (norm(x).double() - truth).abs().max(), (expected.double() - truth).abs().max()
    assert error <= 2 * theirs + 1e-6
    assert not patch_model(model).replaced
    assert torch.nn.LayerNorm is torch_class and torch.nn.LayerNorm.forward is torch_forward
    assert not [w for w, *_ in patch_model(plain, layer_norm=False).replaced if w == "norm"]
    assert "forward" not in vars(plain.norm)
    unpatch(model)
    assert vars(norm).keys() == vars(plain.norm).keys()
    monkey_patch._patch_layer_norm_module(norm)
    assert norm._get_name() == "LigerLayerNorm" and norm.variance_epsilon == 1e-3


def test_layer_norm_without_the_option():
    """A type whose function has no option layer_norm leaves it as it is, patched by hand or not."""
    model = tiny.causal_lm("llama")
    model.model.norm = torch.nn.LayerNorm(64)
    for name in ("LayerNorm", "LigerLayerNorm"):
        assert ("model.norm", "llama has no option layer_norm") in patch_model(model).left
        assert model.model.norm._get_name() == name
        monkey_patch._patch_layer_norm_module(model.model.norm)


def test_layer_norm_of_the_process():
    report = patch_classes("llama4")
    assert ("torch.nn.LayerNorm", "other models use it too; it is replaced in a model that is given") in report.left


@pytest.mark.parametrize("level", ["instance", "before", "after"])
def test_nemotron(level):
    """Norms with weights around zero, squared ReLU and partial rotation: as unpatched in fp32, no further from the truth in bf16."""
    plain = tiny.causal_lm("nemotron")
    model = copy.deepcopy(plain)
    if level == "instance":
        report = patch_model(model)
        assert {now for *_, now in report.replaced} == {
            "LigerLayerNorm", "LigerReLUSquared", "liger_rotary_pos_emb (whole process)", "nemotron.lce_forward"}
        assert not report.left
        mlp = model.model.layers[0].mlp
        assert mlp.act_fn.forward.__func__ is liger.LigerReLUSquared.forward and mlp.act_fn._get_name() == "LigerReLUSquared"
        patch_model(model, relu_squared=False)
        assert "LigerReLUSquared" not in repr(model)
        patch_model(model)
    else:
        patch_classes("nemotron")
        if level == "after":
            model = type(plain)(plain.config)
            model.load_state_dict(plain.state_dict())
    assert "LigerLayerNorm((64,), eps=1e-05" in repr(model)
    unpatched = copy.deepcopy(plain)
    for dtype in (torch.float32, torch.bfloat16):
        ours = compare.run(model.to(dtype))
        if level != "instance":
            unpatch("nemotron")
        theirs, truth = compare.run(unpatched.to(dtype)), compare.run(copy.deepcopy(unpatched).float())
        far, eager = compare.distance(ours, truth), compare.distance(theirs, truth)
        bound = 2e-5 if dtype == torch.float32 else 2**-8
        for what in ("logits", "loss", "gradients"):
            assert getattr(far, what) <= 2 * getattr(eager, what) + bound, (dtype, what)
        if level != "instance":
            patch_classes("nemotron")


def test_layer_norm_offset_is_added_in_fp32():
    """1 + w is not rounded to the weight's dtype, as it is in eager code."""
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

    norm = NemotronLayerNorm1P(32).bfloat16()
    norm.weight.data = (torch.arange(32) / 4096).bfloat16()
    x = torch.randn(64, 32).bfloat16()
    truth = torch.nn.functional.layer_norm(x.double(), (32,), norm.weight.double() + 1, norm.bias.double(), norm.eps)
    eager = (norm(x).double() - truth).abs().mean()
    assert modules.patch_layer(LayerNorm(weight_offset=1.0), norm)
    assert (norm(x).double() - truth).abs().mean() < 0.9 * eager


def test_other_activation_of_a_plain_mlp():
    model = tiny.causal_lm("nemotron", hidden_act="gelu")
    theirs = compare.run(model)
    assert ("model.layers.0.mlp", "its activation is GELUActivation, not relu_squared") in patch_model(model).left
    assert compare.distance(compare.run(model), theirs).gradients < 2e-5
    unpatch(model)
    patch_classes("nemotron")
    assert compare.distance(compare.run(model), theirs).gradients < 2e-5
    assert ("model.layers.0.mlp", "its activation is GELUActivation, not relu_squared") in patch_model(model).left


@pytest.mark.parametrize("kind, flags", [("llama4_text", {}), ("deepseek_v2", {"rope": True})])
def test_complex_rotations(kind, flags):
    """The whole model, with its rotation alone replaced; positions of each sample of their own."""
    off = dict(rms_norm=False, swiglu=False, fused_linear_cross_entropy=False)
    model = tiny.causal_lm(kind)
    modeling = importlib.import_module(type(model).__module__)
    given = compare.inputs()
    given["position_ids"] = torch.arange(19).repeat(3, 1) + torch.tensor([[0], [5], [9]])
    theirs = compare.run(model, **given)
    report = patch_model(model, **off, **flags)
    assert {w.rpartition(".")[2] for w, *_ in report.replaced} >= {"apply_rotary_emb"}
    assert modeling.apply_rotary_emb.__module__.startswith("liger_kernel.")
    far = compare.distance(compare.run(model, **given), theirs)
    assert max(far.logits, far.loss, far.gradients) < 2e-5
    unpatch(model)
    assert modeling.apply_rotary_emb.__module__ == modeling.__name__


def test_vision_rotation():
    """Llama 4's vision transformer rotates by a table of all patches."""
    from transformers.models.llama4 import modeling_llama4

    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
    freqs = torch.polar(torch.ones(5, 1, 4), torch.randn(5, 1, 4))
    expected = modeling_llama4.vision_apply_rotary_emb(q, k, freqs_ci=freqs)
    patch_classes("llama4")
    assert modeling_llama4.vision_apply_rotary_emb is liger.liger_llama4_vision_rotary_pos_emb
    for a, b in zip(modeling_llama4.vision_apply_rotary_emb(q, k, freqs_ci=freqs), expected, strict=True):
        torch.testing.assert_close(a, b)
