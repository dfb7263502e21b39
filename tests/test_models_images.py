"""Every row of a model of images on a tiny random model: patched against unpatched, instance and class, with images and without."""

import copy
import importlib
import inspect

import pytest
import torch

import liger_kernel.transformers as liger
from liger_kernel.patch import compare, patch_model, tiny, unpatch
from liger_kernel.patch.engine import patch_classes_by, patch_model_by
from liger_kernel.patch.models import by_type
from liger_kernel.transformers import monkey_patch

TYPES = tiny.image_types()
WITH_TEXT = [t for t in TYPES if by_type()[t].heads]
CAPPED = ["gemma4", "paligemma", "muse_glimmer"]
ROUTED = ["glm4v_moe", "qwen3_vl_moe", "qwen3_5_moe"]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values")  # Llama 4's vision rotation, cast to bf16


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


def by_class(row, model, **flags):
    """Patches at class level, for the instance that exists already."""
    return patch_classes_by(row, **flags)


def pair(model_type, **changes):
    """(unpatched, patched copy), both in training mode, every part replaced."""
    plain = tiny.causal_lm(model_type, **changes).train()
    patched = copy.deepcopy(plain)
    patch_model_by(by_type()[model_type], patched, **compare.everything(by_type()[model_type]))
    return plain, patched


def assert_close(ours, theirs):
    d = compare.distance(ours, theirs)
    assert d.logits <= 2e-5 and d.loss <= 1e-5 and d.gradients <= 2e-4, d


def text(model):
    """Inputs without an image."""
    given = compare.inputs(vocab_size=tiny.FIRST_SPECIAL_TOKEN)
    names = {"mm_token_type_ids", "token_type_ids"} & set(inspect.signature(type(model).forward).parameters)
    return {**given, **dict.fromkeys(names, torch.zeros_like(given["input_ids"]))}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("patch", [patch_model_by, by_class], ids=["instance", "class"])
@pytest.mark.parametrize("model_type", TYPES)
def test_fp32(model_type, patch, device):
    """Logits, loss and every gradient, those of the vision tower too. Then undone: the same numbers, bit for bit."""
    report, ours, theirs, _ = compare.runs(model_type, device=device, patch=patch)
    assert report.replaced
    assert_close(ours, theirs)
    if device == "cpu":
        unpatch()
        again = compare.run(tiny.causal_lm(model_type))
        assert torch.equal(again.logits, theirs.logits)
        assert all(torch.equal(g, again.gradients[name]) for name, g in theirs.gradients.items())


@pytest.mark.parametrize("model_type", TYPES)
def test_images_matter(model_type):
    """The inputs of these tests reach the vision tower, whose parameters get gradients."""
    model = tiny.causal_lm(model_type)
    towers = [name for name in compare.run(model).gradients if "vision" in name or "visual" in name or model_type == "pixtral"]
    assert len(towers) > 5


@pytest.mark.parametrize("model_type", WITH_TEXT)
def test_text_alone(model_type):
    """Batches without an image."""
    plain, model = pair(model_type)
    assert_close(compare.run(model, **text(model)), compare.run(plain, **text(plain)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", TYPES)
def test_bf16(model_type, device):
    """Against the fp32 model of the same weights: at most twice the error of the unpatched bf16 model, plus a rounding."""
    _, ours, theirs, truth = compare.runs(model_type, torch.bfloat16, device, **compare.all_experts(by_type()[model_type]))
    u = 2.0**-8
    assert abs(ours.loss - truth.loss) <= 2 * abs(theirs.loss - truth.loss) + u * abs(truth.loss)
    assert (ours.logits - truth.logits).norm() <= 2 * (theirs.logits - truth.logits).norm() + u * truth.logits.norm()
    largest = max(want.norm() for want in truth.gradients.values())
    for name, want in truth.gradients.items():
        ours_off, theirs_off = ((r.gradients[name] - want).norm().item() for r in (ours, theirs))
        # Where eager itself is far off, or few numbers are compared, sums cancel and chance decides which rounding is nearer.
        factor = 2 if want.numel() >= 16 and theirs_off <= 0.02 * want.norm() else 4
        bound = factor * theirs_off + u * want.norm() + 1e-3 * u * largest
        assert ours_off <= bound, f"{name}: {ours_off:.3g}, unpatched {theirs_off:.3g} of {want.norm():.3g}"


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
    for name, spec in row.layers.items():
        if spec.rename:
            assert getattr(modeling, name) is spec.replacement.load()


@pytest.mark.parametrize("model_type", TYPES)
def test_twice_and_back(model_type):
    """Patching again replaces nothing; undone, no module has anything of ours."""
    row = by_type()[model_type]
    model = tiny.causal_lm(model_type)
    untouched = {name: set(m.__dict__) for name, m in model.named_modules()}
    first = patch_model_by(row, model, **compare.everything(row))
    second = patch_model_by(row, model, **compare.everything(row))
    assert not second.replaced and {w for w, *_ in second.already} == {w for w, *_ in first.replaced}
    kinds = {type(m).__name__ for m in model.modules()}
    assert {was for _, was, _ in first.replaced} >= {n for n in row.layers if n in kinds}, "a class of the row was not replaced"
    if row.heads:
        assert model.forward.__func__ is row.heads[type(model).__name__].load()
        assert "labels" in inspect.signature(model.forward).parameters
    assert not [why for _, why in first.left if "is in no table" in why and "MLP" not in why]
    unpatch(model)
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == untouched
    assert "Liger" not in repr(model)


def fields(output):
    return {name: value for name, value in output.items() if value is not None}


@pytest.mark.parametrize("model_type", WITH_TEXT)
def test_outputs(model_type):
    """The fields of the original, with and without logits and in a tuple; the loss of all calls is the same."""
    plain, model = pair(model_type)
    inputs = {**compare.inputs_for(model), "output_hidden_states": True, "use_cache": False}
    with compare.mended(plain):
        theirs = plain(**inputs)
        for skip in (True, False):
            ours = model(**inputs, skip_logits=skip)
            assert isinstance(ours, type(theirs)) and (ours.logits is None) == skip
            image = {"image_hidden_states", "image_outputs"} if model_type == "llama4" else set()
            assert fields(ours).keys() | {"logits"} | image == fields(theirs).keys() | {"logits"} | image
            torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=0)
            for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    as_tuple = model(**inputs, skip_logits=False, return_dict=False, return_token_accuracy=True)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], theirs.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(as_tuple[1], theirs.logits, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("model_type", ["llama4", "mllama", "qwen2_5_vl", "llava", *CAPPED])
def test_loss_arguments(model_type):
    """num_items_in_batch, shift_labels (which stay as they are) and skip_logits mean the same on both paths."""
    plain, model = pair(model_type)
    inputs = compare.inputs_for(model)
    labels = inputs.pop("labels")
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    given = shifted.clone()
    with compare.mended(plain):
        expected = plain(**inputs, labels=labels).loss
        logits = plain(**inputs).logits.reshape(-1, 1000).float()
        per_item = torch.nn.functional.cross_entropy(logits, shifted.reshape(-1), reduction="sum") / 7
        for skip in (True, False):
            torch.testing.assert_close(model(**inputs, labels=labels, skip_logits=skip).loss, expected, rtol=1e-5, atol=0)
            torch.testing.assert_close(model(**inputs, shift_labels=shifted, skip_logits=skip).loss, expected, rtol=1e-5, atol=0)
            torch.testing.assert_close(
                model(**inputs, labels=labels, num_items_in_batch=7, skip_logits=skip).loss, per_item, rtol=1e-5, atol=0)
        assert torch.equal(shifted, given)
        kept = model(**inputs, labels=labels, logits_to_keep=6, skip_logits=True).loss
    last = logits.view(3, -1, 1000)[:, -6:].reshape(-1, 1000)
    torch.testing.assert_close(kept, torch.nn.functional.cross_entropy(last, shifted[:, -6:].reshape(-1)), rtol=1e-5, atol=1e-6)
    options = dict(return_token_accuracy=True, return_predicted_tokens=True)
    with_logits, without = (model(**inputs, labels=labels, skip_logits=skip, **options) for skip in (False, True))
    assert torch.equal(with_logits.predicted_tokens, without.predicted_tokens)
    torch.testing.assert_close(with_logits.token_accuracy, without.token_accuracy)
    with pytest.raises(ValueError, match="skip_logits is True, but labels and shift_labels are None"):
        model(**inputs, skip_logits=True)


@pytest.mark.parametrize("model_type", ROUTED)
def test_router_loss(model_type):
    """The load-balancing loss is Hugging Face's and reaches the routers' gradients."""
    plain, model = pair(model_type, router_aux_loss_coef=0.5)
    inputs = compare.inputs_for(model)
    theirs = plain(**inputs, output_router_logits=True)
    theirs.loss.backward()
    for skip in (True, False):
        model.zero_grad(set_to_none=True)
        ours = model(**inputs, output_router_logits=True, skip_logits=skip)
        torch.testing.assert_close(ours.aux_loss, theirs.aux_loss)
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=0)
        ours.loss.backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert (p.grad - q.grad).abs().max() <= 1e-4 * q.grad.abs().max() + 1e-7, name


@pytest.mark.parametrize("model_type", ["qwen2_vl", "glm4v", "mllama", "gemma3"])
def test_generate(model_type):
    plain, model = pair(model_type)
    inputs = {name: value for name, value in compare.inputs_for(model).items() if name != "labels"}
    options = dict(max_new_tokens=4, do_sample=False)
    assert torch.equal(model.eval().generate(**inputs, **options), plain.eval().generate(**inputs, **options))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "llama4", "gemma3", "internvl"])
def test_flags(model_type):
    """Each flag alone replaces its kind and nothing else."""
    row = by_type()[model_type]
    off = dict.fromkeys((*compare.everything(row), *(("rope", row.mlp_flag) if model_type == "internvl" else ())), False)
    kinds = {"rms_norm": "RMSNorm", "layer_norm": "LayerNorm", row.mlp_flag: "MLP", "rope": "rotary",
             "fused_linear_cross_entropy": "forward"}
    model = tiny.causal_lm(model_type)
    for flag, kind in kinds.items():
        report = patch_model(model, **{**off, flag: True})
        assert report.replaced or flag == "rope" and not row.ropes, flag
        assert all(kind in now for *_, now in report.replaced), report
        unpatch(model)


@pytest.mark.parametrize("model_type, inner", [("llava", "llama pixtral"), ("internvl", "qwen2"), ("smolvlm", "llama"),
                                               ("paligemma", "gemma2")])
def test_models_inside(model_type, inner):
    """The rows of the text and vision models inside patch them; their rotations are those modules' own."""
    model = tiny.causal_lm(model_type)
    getattr(liger, f"apply_liger_kernel_to_{model_type}")(model=model)
    assert model.forward.__func__.__module__.endswith(model_type)
    for name in inner.split():
        row = by_type()[name]
        modeling = importlib.import_module(row.module)
        assert all(getattr(modeling, rope) is replacement.load() for rope, replacement in row.ropes.items())
        norms = [m for m in model.modules() if type(m).__name__ in row.norms]
        assert norms and all(m._get_name() == "LigerRMSNorm" for m in norms)
    unpatch(model)


def test_pixtral_activation():
    """Its default activation is GELU, for which there is no gated op: left, on both levels."""
    plain = tiny.causal_lm("pixtral")
    plain.config.hidden_act = "gelu"
    plain = type(plain)(plain.config)
    theirs = compare.run(plain)
    patched = copy.deepcopy(plain)
    report = patch_model(patched)
    assert [why for where, why in report.left if "its activation is" in why]
    assert_close(compare.run(patched), theirs)
    liger.apply_liger_kernel_to_pixtral()
    assert_close(compare.run(plain), theirs)


def test_soft_cap_of_the_installed_paligemma():
    """transformers caps its logits from some version on; ours does when that forward does."""
    from transformers.models.paligemma import modeling_paligemma

    caps = "final_logit_softcapping" in inspect.getsource(modeling_paligemma)
    assert (by_type()["paligemma"].heads["PaliGemmaForConditionalGeneration"].softcap is not None) == caps


def test_fused_llama4_needs_no_mending():
    """transformers 5.24's own Llama4ForConditionalGeneration fails in every call; its loss is computed here all the same."""
    _, model = pair("llama4")
    out = model(**compare.inputs_for(model), output_router_logits=True)
    assert out.loss.isfinite() and out.logits is None


def test_names_of_older_versions(monkeypatch):
    """Qwen2-VL before transformers 5.2 and 5.17: Qwen2's norm, and rotation by sections of channels."""
    from liger_kernel.ops.qwen2vl_mrope import liger_multimodal_rotary_pos_emb
    from liger_kernel.patch import families
    from liger_kernel.patch.models import qwen_vl

    assert list(qwen_vl._norms("qwen2_vl", "Qwen2VLRMSNorm")) == ["Qwen2VLRMSNorm"]
    old = "from x import Qwen2RMSNorm\ndef apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):\n"
    monkeypatch.setattr(families, "_source", lambda name: old)
    assert list(qwen_vl._norms("qwen2_vl", "Qwen2VLRMSNorm")) == ["Qwen2RMSNorm"]
    assert qwen_vl._ropes("qwen2_vl")["apply_multimodal_rotary_pos_emb"].load() is liger_multimodal_rotary_pos_emb


def test_wrappers_pass_flags_on():
    """Flags that LLaVA's function has no parameter for reach the models inside; names that mean nothing are ignored."""
    model = tiny.causal_lm("llava")
    liger.apply_liger_kernel_to_llava(model=model, rms_norm=False, no_such_flag=True)
    assert "LigerSwiGLUMLP" in repr(model) and "LigerRMSNorm" not in repr(model)
    monkey_patch._apply_liger_kernel_to_instance(tiny.causal_lm("internvl"), swiglu=False, use_reentrant=True)


def test_sub_models_alone():
    """The base model and the text model of a composite are taken by its function too."""
    for name in ("qwen2_vl", "glm4v", "qwen3_vl_moe", "muse_glimmer"):
        model = tiny.causal_lm(name)
        for part in (model.model.language_model, model.model):
            getattr(liger, f"apply_liger_kernel_to_{name}")(model=part)
            assert "LigerRMSNorm" in repr(part)
            unpatch(part)
