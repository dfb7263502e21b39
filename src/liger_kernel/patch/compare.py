"""Patched against unpatched: how far apart the logits, the loss and the gradients of a tiny random model are."""

import contextlib
import copy
import dataclasses
import inspect

import torch

from liger_kernel.patch import tiny
from liger_kernel.patch.engine import patch_model_by
from liger_kernel.patch.models import by_type, rows


@dataclasses.dataclass(frozen=True)
class Run:
    """One training step: logits, loss and the gradient of every parameter that has one."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict


@dataclasses.dataclass(frozen=True)
class Distance:
    """Largest differences of two runs, each relative to the largest element of the tensor in the run that counts as true."""

    logits: float
    loss: float
    gradients: float


def everything(row):
    """The flags that replace all a row can replace."""
    parts = [row, *(rows()[name] for name in row.parts)]
    ropes, mlps = any(part.ropes for part in parts), any(part.mlps for part in parts)
    served = {"rope": ropes, "swiglu": mlps, "geglu": mlps, "cross_entropy": False}
    return {name: served.get(name, True) for name, _ in row.parameters if name not in ("model", "**kwargs")}


def inputs(length=19, vocab_size=1000):
    """Three sequences with labels; the last is padded, some labels are ignored."""
    ids = torch.randint(3, vocab_size, (3, length), generator=torch.Generator().manual_seed(1))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :4] = -100
    ids[2, -5:], labels[2, -5:], mask[2, -5:] = 0, -100, 0
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def image_inputs(model):
    """:func:`inputs` with an image in each of the first two sequences; pixels alone for a model of images alone."""
    model_type, parameters = model.config.model_type, inspect.signature(type(model).forward).parameters
    if "input_ids" not in parameters:
        return tiny.images(model, 2)
    given = inputs(vocab_size=tiny.FIRST_SPECIAL_TOKEN)
    tokens = by_type()[model_type].tiny["image"]["tokens"]  # of one image; 0: the model looks at it in other layers
    kinds = torch.zeros_like(given["input_ids"])
    kinds[:2, 2 : 2 + tokens] = 1
    given["input_ids"][kinds == 1] = tiny.IMAGE_TOKEN
    given["labels"][kinds == 1] = -100
    given.update(tiny.images(model, 2 if tokens else 3))
    given.update({name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in parameters})
    return given


def inputs_for(model):
    """Inputs with images where the model takes them."""
    return image_inputs(model) if tiny.takes_pixels(model.config.model_type) else inputs()


@contextlib.contextmanager
def mended(model):
    """transformers 5.24 takes `image_outputs` from the output of Llama 4's text model, which has none: no call of an unpatched
    Llama4ForConditionalGeneration succeeds. Inside this context it has one, None."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast as Output

    missing = model.config.model_type == "llama4" and not hasattr(Output, "image_outputs")
    if missing:
        Output.image_outputs = None
    try:
        yield
    finally:
        if missing:
            del Output.image_outputs


@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # images pass a convolution, whose gradients TF32 rounds to 1e-4
def run(model, **given):
    """A :class:`Run` of `model` in training mode. Without a head, hidden states count as logits and a fixed projection as loss."""
    model.train().zero_grad(set_to_none=True)
    given = {name: value.to(model.device) for name, value in (given or inputs_for(model)).items()}
    given = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in given.items()}
    if model.get_output_embeddings() is None:
        given.pop("labels", None)
        logits = model(**given).last_hidden_state
        loss = (logits.float() * torch.linspace(-1, 1, logits.numel(), device=logits.device).view(logits.shape).sin()).sum()
    else:
        with mended(model):
            out = model(**given)
            logits, loss = out.logits, out.loss
            if logits is None:
                with torch.no_grad():
                    logits = model(**given, skip_logits=False).logits
    loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return Run(logits.detach().double(), loss.detach().double(), gradients)


def distance(a, true):
    """The :class:`Distance` of run `a` from run `true`."""
    assert a.gradients.keys() == true.gradients.keys(), f"gradients of {a.gradients.keys() ^ true.gradients.keys()} in one run only"
    floor = 1e-3 * max(g.abs().max() for g in true.gradients.values())  # sums that cancel have no relative accuracy

    def relative(x, y, floor=1e-30):
        return ((x - y).abs().max() / y.abs().max().clamp(min=floor)).item()

    gradients = max(relative(a.gradients[name], true.gradients[name], floor) for name in true.gradients)
    return Distance(relative(a.logits, true.logits), relative(a.loss, true.loss), gradients)


def all_experts(row):
    """Changes to the row's tiny configuration that route every token to every expert: between fewer, rounding alone can make
    another choice, and the difference of two runs then says nothing about either."""
    counts = [row.tiny[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in row.tiny]
    return {name: counts[0] for name in ("num_experts_per_tok", "moe_topk", "top_k_experts") if name in row.tiny}


def runs(model_type, dtype=torch.float32, device="cpu", patch=patch_model_by, **changes):
    """A tiny random model of a type with `changes` to its configuration, patched by `patch(row, model, **flags)`.

    Returns:
        (report of the patch, run of the patched model, of the unpatched one, and of that one in fp32 with the same weights).
    """
    row = by_type()[model_type]
    plain = tiny.causal_lm(model_type, **changes).to(device)
    if dtype != torch.float32:
        plain.to(dtype)
    theirs = run(plain)
    truth = theirs if dtype == torch.float32 else run(copy.deepcopy(plain).float())
    patched = copy.deepcopy(plain)
    report = patch(row, patched, **everything(row))
    return report, run(patched), theirs, truth


def compare(model_type, device="cpu"):
    """Patches a tiny random model of a type.

    Returns:
        (report of the patch, fp32 distance of the patched tiny model to the unpatched one, bf16 distance of the patched one to the
        unpatched one in fp32, and that of the unpatched one in bf16).
    """
    report, ours, theirs, _ = runs(model_type, device=device)
    exact = distance(ours, theirs)
    _, ours, theirs, truth = runs(model_type, torch.bfloat16, device, **all_experts(by_type()[model_type]))
    return report, exact, distance(ours, truth), distance(theirs, truth)
