"""Every text row on a tiny random model: patched against unpatched, instance and class, fp32 and bf16; heads that are not plain."""

import copy
import importlib

import pytest
import torch

import liger_kernel.transformers as liger
from liger_kernel.patch import compare, patch_model, tiny, unpatch
from liger_kernel.patch.engine import patch_classes_by, patch_model_by
from liger_kernel.patch.models import by_type, rows

TYPES = [row.types[0] if row.types else name for name, row in rows().items()]
WITH_HEAD = [t for t in TYPES if tiny.class_with_head(t)]
SPECIAL = [
    "granite", "gemma2", "gemma3_text", "gemma4_text", "falcon_h1", "mixtral", "gpt_oss", "hunyuan_v1_moe", "deepseek_v4", "llama4_text",
]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
ROUTED = [t for t in WITH_HEAD if any(h.router_loss for h in by_type()[t].heads.values())]


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


def pair(model_type, **changes):
    """(unpatched, patched copy), both in training mode, every part replaced."""
    plain = tiny.causal_lm(model_type, **changes).train()
    patched = copy.deepcopy(plain)
    patch_model_by(by_type()[model_type], patched, **compare.everything(by_type()[model_type]))
    return plain, patched


def by_class(row, model, **flags):
    """Patches at class level, for the instance that exists already."""
    return patch_classes_by(row, **flags)


def assert_close(ours, theirs):
    d = compare.distance(ours, theirs)
    assert d.logits <= 1e-5 and d.loss <= 1e-5 and d.gradients <= 1e-4, d


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("patch", [patch_model_by, by_class], ids=["instance", "class"])
@pytest.mark.parametrize("model_type", TYPES)
def test_fp32(model_type, patch, device):
    """Logits, loss and every gradient; the loss without logits. Then undone: the same numbers as before, bit for bit."""
    report, ours, theirs, _ = compare.runs(model_type, device=device, patch=patch)
    assert report.replaced
    assert_close(ours, theirs)
    if device != "cpu":
        return  # eager code on CUDA does not repeat its own sums
    unpatch()
    again = compare.run(tiny.causal_lm(model_type))
    assert torch.equal(again.logits, theirs.logits)
    assert all(torch.equal(g, again.gradients[name]) for name, g in theirs.gradients.items())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", TYPES)
def test_bf16(model_type, device):
    """Against the fp32 model of the same weights: at most twice the error of the unpatched bf16 model, plus a rounding."""
    _, ours, theirs, truth = compare.runs(model_type, torch.bfloat16, device, **compare.all_experts(by_type()[model_type]))
    u = 2.0**-8
    assert abs(ours.loss - truth.loss) <= 2 * abs(theirs.loss - truth.loss) + u * abs(truth.loss)
    assert (ours.logits - truth.logits).norm() <= 2 * (theirs.logits - truth.logits).norm() + u * truth.logits.norm()
    for name, want in truth.gradients.items():
        ours_off, theirs_off = ((r.gradients[name] - want).norm().item() for r in (ours, theirs))
        # Where eager itself is far off, or few numbers are compared, sums cancel and chance decides which rounding is nearer.
        factor = 2 if want.numel() >= 16 and theirs_off <= 0.02 * want.norm() else 4
        assert ours_off <= factor * theirs_off + u * want.norm(), f"{name}: {ours_off:.3g}, unpatched {theirs_off:.3g} of {want.norm():.3g}"


@pytest.mark.parametrize("model_type", TYPES)
def test_built_after_a_class_level_call(model_type):
    """The same weights, the same numbers, our classes under the models' names, checkpoints as before."""
    row = by_type()[model_type]
    plain = tiny.causal_lm(model_type)
    theirs = compare.run(plain)
    patch_classes_by(row, **compare.everything(row))
    model = tiny.causal_lm(model_type)
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.load_state_dict(plain.state_dict())
    assert_close(compare.run(model), theirs)
    modeling = importlib.import_module(row.module)
    for name, spec in {**row.norms, **row.mlps}.items():
        if getattr(spec, "rename", True):
            assert getattr(modeling, name) is spec.replacement.load()
    for name, replacement in row.ropes.items():
        assert getattr(modeling, name) is replacement.load()


@pytest.mark.parametrize("model_type", TYPES)
def test_twice_and_back(model_type):
    """Patching again replaces nothing; undone, no module has anything of ours."""
    row = by_type()[model_type]
    model = tiny.causal_lm(model_type)
    untouched = {name: set(m.__dict__) for name, m in model.named_modules()}
    first = patch_model_by(row, model, **compare.everything(row))
    second = patch_model_by(row, model, **compare.everything(row))
    assert not second.replaced and {w for w, *_ in second.already} == {w for w, *_ in first.replaced}
    for where, was, now in first.replaced:
        if now == "LigerRMSNorm":
            norm = model.get_submodule(where)
            assert norm.forward.__func__ is liger.LigerRMSNorm.forward and norm._get_name() == "LigerRMSNorm"
            attributes = {"offset", "casting_mode", "in_place", "row_mode", "variance_epsilon"}
            assert type(norm).__name__ == was and attributes <= set(norm.__dict__)
    if model_type in WITH_HEAD:
        assert model.forward.__func__ is row.heads[type(model).__name__].load()
    unpatch(model)
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == untouched
    assert "Liger" not in repr(model)


def fields(output):
    return {name: value for name, value in output.items() if value is not None}


@pytest.mark.parametrize("model_type", WITH_HEAD)
def test_outputs(model_type):
    """The fields of the original, with and without logits and in a tuple; the loss of all calls is the same."""
    plain, model = pair(model_type)
    inputs = {**compare.inputs(), "output_hidden_states": True, "use_cache": False}
    theirs = plain(**inputs)
    for skip in (True, False):
        ours = model(**inputs, skip_logits=skip)
        assert isinstance(ours, type(theirs))
        assert fields(ours).keys() | {"logits"} == fields(theirs).keys() | {"logits"}
        assert (ours.logits is None) == skip
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=0)
        for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    as_tuple = model(**compare.inputs(), use_cache=False, skip_logits=False, return_dict=False, return_token_accuracy=True)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], theirs.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(as_tuple[1], theirs.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", SPECIAL)
def test_loss_arguments(model_type):
    """Scaled, capped and routed heads: num_items_in_batch, shift_labels, logits_to_keep and skip_logits mean the same on both paths."""
    plain, model = pair(model_type)
    inputs = compare.inputs()
    labels = inputs.pop("labels")
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    for items in (7, torch.tensor(7)):
        expected = plain(**inputs, labels=labels, num_items_in_batch=items).loss
        for skip in (True, False):
            torch.testing.assert_close(model(**inputs, labels=labels, num_items_in_batch=items, skip_logits=skip).loss, expected)
    expected = plain(**inputs, labels=labels).loss
    for skip in (True, False):
        torch.testing.assert_close(model(**inputs, shift_labels=shifted, skip_logits=skip).loss, expected)
    kept = model(**inputs, labels=labels, logits_to_keep=6, skip_logits=True).loss
    logits = plain(**inputs).logits[:, -6:].reshape(-1, 1000).float()
    torch.testing.assert_close(kept, torch.nn.functional.cross_entropy(logits, shifted[:, -6:].reshape(-1)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(**inputs, logits_to_keep=6).logits, plain(**inputs, logits_to_keep=6).logits, rtol=1e-4, atol=1e-5)
    options = dict(return_token_accuracy=True, return_predicted_tokens=True)
    with_logits, without = (model(**inputs, labels=labels, skip_logits=skip, **options) for skip in (False, True))
    assert torch.equal(with_logits.predicted_tokens, without.predicted_tokens)
    torch.testing.assert_close(with_logits.token_accuracy, without.token_accuracy)
    with pytest.raises(ValueError, match="skip_logits is True, but labels and shift_labels are None"):
        model(**inputs, skip_logits=True)


@pytest.mark.parametrize("model_type", ROUTED)
def test_router_loss(model_type):
    """The load-balancing loss is Hugging Face's, by argument or configuration, and reaches the routers' gradients."""
    inputs = compare.inputs()
    for changes, extra in (({}, {"output_router_logits": True}), ({"output_router_logits": True}, {})):
        plain, model = pair(model_type, router_aux_loss_coef=0.5, **changes)
        theirs = plain(**inputs, **extra)
        theirs.loss.backward()
        for skip in (True, False):
            model.zero_grad(set_to_none=True)
            ours = model(**inputs, **extra, skip_logits=skip)
            torch.testing.assert_close(ours.aux_loss, theirs.aux_loss)
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=0)
            assert len(ours.router_logits) == len(theirs.router_logits)
            ours.loss.backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None)
                if p.grad is not None:
                    assert (p.grad - q.grad).abs().max() <= 1e-4 * q.grad.abs().max() + 1e-8, name
        plain = plain(**inputs, output_router_logits=False)
        torch.testing.assert_close(model(**inputs, output_router_logits=False, skip_logits=True).loss, plain.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("model_type", ["falcon_h1", "qwen3_next", "gemma4_text", "gpt_oss", "deepseek_v3", "phi3", "glm4", "llama4_text"])
def test_generate(model_type):
    plain, model = pair(model_type)
    ids = compare.inputs()["input_ids"][:2, :7]
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert torch.equal(model.eval().generate(ids, **options), plain.eval().generate(ids, **options))


def test_granite_defaults():
    """Its plain call keeps logits; the fused loss works when asked for."""
    model = tiny.causal_lm("granite").train()
    liger.apply_liger_kernel_to_granite(model=model)
    assert model(**compare.inputs()).logits is not None and model.loss_function.__module__.startswith("liger_kernel")
    unpatch(model)
    liger.apply_liger_kernel_to_granite(model=model, cross_entropy=False, fused_linear_cross_entropy=True)
    assert model(**compare.inputs()).logits is None


@pytest.mark.parametrize("model_type", ["gemma4_text", "qwen3_moe", "falcon_h1"])
def test_flags(model_type):
    """Each flag alone replaces its kind and nothing else; what is off is reported."""
    row = by_type()[model_type]
    flags = compare.everything(row)
    kinds = {"rms_norm": ("LigerRMSNorm",), row.mlp_flag: ("MLP", "Experts"), "rope": ("liger_rotary",),
             "fused_linear_cross_entropy": ("forward",)}
    model = tiny.causal_lm(model_type)
    for flag, kind in kinds.items():
        report = patch_model(model, **{**dict.fromkeys(flags, False), flag: True})
        assert report.replaced and all(any(word in now for word in kind) for *_, now in report.replaced), report
        assert {f"{other} is off" for other in (row.mlp_flag, "rms_norm", "rope")} - {f"{flag} is off"} <= {why for _, why in report.left}
        unpatch(model)


@pytest.mark.parametrize("model_type", ["llama", "smollm3", "granite", "falcon_h1", "deepseek_v2", "deepseek_v3"])
def test_mlp_biases_stay(model_type):
    """Departure 7: biases of checkpoints are loaded and used, on both levels."""
    changes = {"mlp_bias": True}
    plain = tiny.causal_lm(model_type, **changes)
    row = by_type()[model_type]
    if not any(name.endswith("down_proj.bias") for name, _ in plain.named_parameters()):
        pytest.skip(f"{model_type} has no biases in the installed transformers")
    theirs = compare.run(plain)
    patched = copy.deepcopy(plain)
    patch_model_by(row, patched, **compare.everything(row))
    assert_close(compare.run(patched), theirs)
    patch_classes_by(row, **compare.everything(row))
    later = tiny.causal_lm(model_type, **changes)
    later.load_state_dict(plain.state_dict())
    assert_close(compare.run(later), theirs)


def test_another_activation_is_left():
    """A row's MLP with another activation than the row's keeps its forward, and says so."""
    others = {"qwen3": {"hidden_act": "relu"}, "gemma2": {"hidden_activation": "gelu"}, "phi3": {"hidden_act": "gelu"}}
    for model_type, change in others.items():
        plain, model = pair(model_type, **change)
        assert_close(compare.run(model), compare.run(plain))
        report = patch_model(model)
        assert [w for w, why in report.left if "its activation is" in why]
