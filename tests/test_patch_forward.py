"""Patched against unpatched tiny models: logits, loss and every gradient, and the contract of the patched forward."""

import copy
import importlib
import inspect

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from liger_kernel.patch import patch_model, tiny
from liger_kernel.patch.engine import unpatch
from liger_kernel.patch.models import rows

VARIANTS = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"mlp_bias": True, "attention_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
}
ROWS = ("llama", "mistral", "qwen2")


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


def pair(model_type, dtype=torch.float32, flags=None, **changes):
    """(unpatched, patched copy), both in training mode."""
    plain = tiny.causal_lm(model_type, **changes).to(dtype).train()
    patched = copy.deepcopy(plain)
    patch_model(patched, **(flags or {}))
    return plain, patched


def batch(length=19, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 1000, (3, length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :4] = -100
    ids[2, -5:], labels[2, -5:], mask[2, -5:] = 0, -100, 0
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def gradients(model, **inputs):
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(ours, theirs, tolerance):
    """Relative to the largest element of each gradient."""
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        error = (ours[name].double() - want.double()).abs().max() / want.double().abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.3g}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32(variant):
    model_type, changes = VARIANTS[variant]
    plain, patched = pair(model_type, **changes)
    inputs = batch()
    theirs, their_grads = gradients(plain, **inputs)
    ours, our_grads = gradients(patched, **inputs)
    assert ours.logits is None
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)
    assert_same_gradients(our_grads, their_grads, 2e-5)
    ours, our_grads = gradients(patched, skip_logits=False, **inputs)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)
    assert_same_gradients(our_grads, their_grads, 2e-5)


@pytest.mark.parametrize("model_type", ROWS)
def test_bf16_is_no_further_from_the_truth(model_type):
    """Against the fp32 model of the same (bf16) weights: at most 1.5 times the error of the unpatched bf16 model, plus rounding."""
    plain, patched = pair(model_type, torch.bfloat16)
    inputs = batch()
    truth_out, truth = gradients(copy.deepcopy(plain).float(), **inputs)
    theirs_out, theirs = gradients(plain, **inputs)
    ours_out, ours = gradients(patched, **inputs)
    u = 2**-8
    assert ours_out.loss.dtype == torch.float32
    assert (ours_out.loss - truth_out.loss).abs() <= 1.5 * (theirs_out.loss - truth_out.loss).abs() + u * truth_out.loss

    def distance(grads, name):
        return ((grads[name].double() - truth[name].double()).norm() / truth[name].double().norm()).item()

    for name in truth:
        assert distance(ours, name) <= 1.5 * distance(theirs, name) + u, name


@pytest.mark.parametrize("model_type", ROWS)
def test_skip_logits(model_type):
    """C99: logits are made when asked for, or outside training, or without labels; never silently missing."""
    plain, model = pair(model_type)
    inputs = batch()
    unlabelled = {k: v for k, v in inputs.items() if k != "labels"}
    model.eval(), plain.eval()
    expected = plain(**inputs)
    evaluated = model(skip_logits=True, **inputs)
    assert evaluated.logits is None
    torch.testing.assert_close(evaluated.loss, expected.loss)
    torch.testing.assert_close(model(**inputs).logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert model(**unlabelled).logits is not None and model(**unlabelled).loss is None
    model.train()
    assert model(**inputs).logits is None
    assert model(skip_logits=False, **inputs).logits is not None
    assert model(**unlabelled).logits is not None
    with pytest.raises(ValueError, match="skip_logits is True, but labels and shift_labels are None"):
        model(skip_logits=True, **unlabelled)
    unlabelled["num_items_in_batch"] = 7  # as from a trainer that computes the loss from logits
    out = model.eval()(skip_logits=True, **unlabelled)
    assert out.loss is None
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_no_logits_are_allocated():
    """C99: no tensor of rows x vocabulary elements exists at any point of an evaluation without logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor) and t.shape[-1:] == (4096,):
                    self.size = max(self.size, t.numel())
            return out

    _, model = pair("llama", vocab_size=4096)
    ids = torch.randint(3, 4096, (4, 100))
    with Largest() as largest, torch.no_grad():
        model.eval()(input_ids=ids, labels=ids, skip_logits=True)
    assert largest.size < 400 * 4096


def test_shift_labels():
    """C102: given shift_labels decide, with or without labels, on both paths; per-token outputs have their length."""
    plain, model = pair("llama")
    inputs = batch()
    labels = inputs.pop("labels")
    other = torch.randint(3, 1000, labels.shape)
    other[0, 3:9] = -100
    expected = plain(labels=other, shift_labels=other, **inputs).loss
    for given in ({"labels": labels, "shift_labels": other}, {"shift_labels": other}):
        for skip in (True, False, None):
            torch.testing.assert_close(model(skip_logits=skip, **given, **inputs).loss, expected, rtol=1e-5, atol=0)
    out = model(labels=labels, shift_labels=other, return_predicted_tokens=True, **inputs)
    assert out.predicted_tokens.shape == (labels.numel(),)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(shift_labels=shifted, **inputs).loss, model(labels=labels, **inputs).loss)


def test_accuracy_and_predictions():
    """C101: a 0-dim accuracy on the device, the same with and without logits; None unless asked for."""
    plain, model = pair("qwen2")
    inputs = batch()
    predicted = plain(**inputs).logits.argmax(-1)
    target = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    hits = (predicted == target)[target != -100].float().mean()
    for skip in (True, False):
        out = model(return_token_accuracy=True, return_predicted_tokens=True, skip_logits=skip, **inputs)
        assert out.token_accuracy.dim() == 0 and (out.logits is None) == skip
        torch.testing.assert_close(out.token_accuracy, hits)
        assert torch.equal(out.predicted_tokens, predicted.where(target != -100, -1).reshape(-1))
    assert model(**inputs).token_accuracy is None
    assert model(skip_logits=False, **inputs).token_accuracy is None


def test_loss_options_agree_on_both_paths():
    """C101: smoothing, z-loss, class weights, token scaling and another ignore_index mean the same with logits and without."""
    plain, model = pair("llama")
    inputs = batch()
    options = {
        "label_smoothing": 0.1, "lse_square_scale": 1e-3, "ce_weight": torch.rand(1000) + 0.5, "use_token_scaling": True,
        "ignore_index": 7, "num_items_in_batch": 11,
    }
    scaled = {name: options[name] for name in ("use_token_scaling", "ce_weight", "lse_square_scale")}
    everything = {**scaled, "num_items_in_batch": 11, "label_smoothing": 0.1}
    for given in (*({name: value} for name, value in options.items()), scaled, everything):
        labels = inputs["labels"] if "ignore_index" not in given else inputs["labels"].where(inputs["labels"] != -100, 7)
        both = [gradients(model, **{**inputs, "labels": labels}, skip_logits=skip, **given) for skip in (True, False)]
        losses = [out.loss for out, _ in both]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-7, msg=f"{list(given)}: {losses}")
        assert_same_gradients(both[0][1], both[1][1], 1e-4)
    smooth = torch.nn.functional.cross_entropy(
        plain(**inputs).logits[:, :-1].reshape(-1, 1000), inputs["labels"][:, 1:].reshape(-1), label_smoothing=0.1)
    torch.testing.assert_close(model(label_smoothing=0.1, **inputs).loss, smooth, rtol=1e-5, atol=0)


def test_unknown_arguments():
    """C105: what the original accepts is accepted and still reaches the attention; the loss drops what it does not know."""
    _, model = pair("llama")
    seen = {}
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    inputs = batch()
    base = model(**inputs).loss
    extra = dict(cu_seq_lens_q=None, max_length_q=19, my_own_key=3, output_attentions=False)
    out = model(**inputs, **extra, num_items_in_batch=torch.tensor(1))
    assert seen["my_own_key"] == 3 and seen["max_length_q"] == 19 and "num_items_in_batch" not in seen
    valid = (inputs["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(out.loss, base * valid, rtol=1e-5, atol=0)
    hidden = model(**inputs, output_hidden_states=True).hidden_states
    assert len(hidden) == 3
    as_tuple = model(**inputs, return_dict=False, return_token_accuracy=True)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[0], base)
    assert as_tuple[-1].dim() == 0
    assert isinstance(model(**inputs, return_dict=True), CausalLMOutputWithPast)


def test_positional_arguments():
    plain, model = pair("llama")
    inputs = batch()
    torch.testing.assert_close(model(inputs["input_ids"], inputs["attention_mask"], labels=inputs["labels"]).loss, plain(**inputs).loss)
    with pytest.raises(TypeError, match="again by keyword"):
        model(inputs["input_ids"], input_ids=inputs["input_ids"])


@pytest.mark.parametrize("keep", [0, 6, torch.tensor([3, 5, 11]), torch.tensor([[1, 4], [2, 5], [7, 8]]), "mask"], ids=str)
def test_logits_to_keep(keep):
    """The fused loss covers the kept positions, the labels sliced alike; a mask keeps another number from each sample."""
    plain, model = pair("mistral")
    inputs = batch()
    if isinstance(keep, str):
        keep = torch.rand(inputs["input_ids"].shape, generator=torch.Generator().manual_seed(0)) < 0.4
    logits = plain(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    target = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    if isinstance(keep, int):
        logits, target = logits[:, -keep:], target[:, -keep:]
    elif keep.dtype == torch.bool:
        logits, target = logits[keep], target[keep]
    elif keep.dim() == 2:
        logits, target = logits.take_along_dim(keep[..., None], 1), target.take_along_dim(keep, 1)
    else:
        logits, target = logits[:, keep], target[:, keep]
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 1000), target.reshape(-1))
    torch.testing.assert_close(model(logits_to_keep=keep, **inputs).loss, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("model_type", ROWS)
def test_num_items_and_accumulation(model_type):
    """One batch of 4 sequences, in 1, 2 and 4 parts with the items of the whole: the same gradients."""
    plain, model = pair(model_type)
    ids = torch.randint(3, 1000, (4, 15), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :9], labels[3, 5:] = -100, -100
    items = (labels[:, 1:] != -100).sum()
    plain(input_ids=ids, labels=labels).loss.backward()
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    for parts in (1, 2, 4):
        model.zero_grad(set_to_none=True)
        total = 0
        for i, (x, y) in enumerate(zip(ids.chunk(parts), labels.chunk(parts), strict=True)):
            loss = model(input_ids=x, labels=y, num_items_in_batch=items if i % 2 else int(items)).loss
            loss.backward()
            total += loss.detach()
        torch.testing.assert_close(total, plain(input_ids=ids, labels=labels).loss.detach(), rtol=1e-5, atol=0)
        assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, theirs, 3e-5)


def test_everything_ignored():
    """No label counts: the loss and all gradients are 0, not NaN."""
    _, model = pair("llama")
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    out, grads = gradients(model, return_token_accuracy=True, **inputs)
    assert out.loss == 0 and out.token_accuracy == 0
    assert all((g == 0).all() for g in grads.values())


def test_label_out_of_range():
    _, model = pair("llama")
    inputs = batch()
    inputs["labels"][0, 7] = 1000
    with pytest.raises(AssertionError, match="out of bounds"):
        model(**inputs)


@pytest.mark.parametrize("model_type", ROWS)
def test_generate(model_type):
    plain, model = pair(model_type)
    ids = batch()["input_ids"][:2, :6]
    for options in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}):
        expected = plain.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **options)
        assert torch.equal(model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **options), expected)


def test_gradient_checkpointing():
    plain, model = pair("llama")
    model.gradient_checkpointing_enable()
    inputs = batch()
    _, theirs = gradients(plain, **inputs)
    _, ours = gradients(model, **inputs)
    assert_same_gradients(ours, theirs, 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    """C91: fp32 parameters under autocast; gradients in the parameters' dtype."""
    plain, model = pair("llama")
    inputs = batch()
    _, truth = gradients(plain, **inputs)
    with torch.autocast("cpu", dtype):
        out, ours = gradients(model, **inputs)
    assert all(g.dtype == torch.float32 for g in ours.values())
    assert_same_gradients(ours, truth, 0.1)


@pytest.mark.parametrize("frozen", ["head", "backbone"])
def test_frozen_parts(frozen):
    plain, model = pair("llama")
    for m in (plain, model):
        for p in (m.lm_head if frozen == "head" else m.model).parameters():
            p.requires_grad_(False)
        m(**batch()).loss.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-7)


def test_signature():
    """What Trainer, PEFT and generate look up: input names, labels, **kwargs; skip_logits beside them."""
    plain, model = pair("llama")
    original, ours = (inspect.signature(m.forward).parameters for m in (plain, model))
    assert list(ours) == [*list(original)[:-1], "skip_logits", list(original)[-1]]
    assert ours["skip_logits"].default is None
    assert list(ours.values())[-1].kind is inspect.Parameter.VAR_KEYWORD
    assert list(inspect.signature(type(model).forward).parameters) == ["self", *original]  # the class is as it was


def test_forward_functions_are_distinct():
    """One plain function for each class, of the module that the tables name, with source."""
    heads = [head for row in rows().values() for head in row.heads.values()]
    functions = [head.load() for head in heads]
    assert len({id(f) for f in functions}) == len(heads)
    for head, function in zip(heads, functions, strict=True):
        assert inspect.isfunction(function) and inspect.getsourcefile(function) and "skip_logits" in inspect.getsource(function)
        assert (function.__module__, function.__name__) == (f"liger_kernel.transformers.model.{head.file}", head.function)
    for name in ROWS:
        _, model = pair(name)
        assert model.forward.__func__ is importlib.import_module(f"liger_kernel.transformers.model.{name}").lce_forward


def test_cache_argument_names():
    """C109: the cache goes by its old and its new name."""
    plain, model = pair("llama")
    ids = batch()["input_ids"][:1]
    name = "cache" if "cache" in inspect.signature(plain.forward).parameters else "past_key_values"
    first = model.eval()(input_ids=ids[:, :8], use_cache=True)
    after = model(input_ids=ids[:, 8:], labels=ids[:, 8:], skip_logits=True, **{name: getattr(first, name)})
    assert after[name] is first[name]
    assert after.loss.isfinite()
