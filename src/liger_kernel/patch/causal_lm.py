"""The forward of every patched language model: backbone, then the loss straight from hidden states and head weight.

Two kinds of call go to the model's own forward unchanged: those without labels (generation), and those that ask for logits and
whose loss Hugging Face's own function computes. All arguments and output fields are the model's, whatever its version calls them.
"""

import dataclasses
import functools
import importlib
import inspect
import types
import typing

import torch

from liger_kernel.patch import head_weight, journal, modules
from liger_kernel.patch.models import rows
from liger_kernel.patch.specs import Replacement

_LOSS = Replacement("model.loss_utils", "liger_causal_lm_loss")
_BOTH_OFF = "fused_linear_cross_entropy and cross_entropy are off"

# Arguments for the loss alone, kept from the backbone. Hugging Face's loss knows the first group only.
HF_LOSS_ARGUMENTS = ("num_items_in_batch", "ignore_index")
OUR_LOSS_ARGUMENTS = ("return_token_accuracy", "return_predicted_tokens", "use_token_scaling", "label_smoothing", "lse_square_scale",
                      "ce_weight", "accum_dtype", "chunk_mem_const")
_HINTS = ("accum_dtype", "chunk_mem_const")  # change neither the loss nor the results


def _with_skip_logits(signature):
    """`signature` with skip_logits=None before **kwargs."""
    parameters = [p for p in signature.parameters.values() if p.name != "skip_logits"]
    variadic = [p for p in parameters if p.kind is p.VAR_KEYWORD] or [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    skip = inspect.Parameter("skip_logits", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    if any(p.kind is p.KEYWORD_ONLY for p in parameters):
        skip = skip.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    return signature.replace(parameters=[*(p for p in parameters if p.kind is not p.VAR_KEYWORD), skip, *variadic])


def _output_class(signature, modeling):
    """The ModelOutput that the annotation of a forward names, alone or in a union."""
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils import ModelOutput

    annotation = signature.return_annotation
    if isinstance(annotation, str):
        annotation = eval(annotation, vars(modeling))  # transformers' own source text
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    candidates = typing.get_args(annotation) if union else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, ModelOutput)), CausalLMOutputWithPast)


def _at(model, path):
    """The attribute at a dotted path of the model, or None where the path ends early."""
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def _number(model, path):
    """The number at an attribute path ("1/..." inverts it), or None."""
    value = None if path is None else _at(model, path.removeprefix("1/"))
    return 1.0 / value if value is not None and path.startswith("1/") else value


def _keep(tensor, logits_to_keep):
    """The positions of `tensor` (batch, length, ...) that logits_to_keep names: the last n (0: all), a list of positions for all
    samples or one list for each, or a mask."""
    if isinstance(logits_to_keep, int):
        return tensor if logits_to_keep == 0 else tensor[:, -logits_to_keep:]
    if logits_to_keep.dim() == 2 and logits_to_keep.dtype != torch.bool:
        return tensor.take_along_dim(logits_to_keep[(..., *(None,) * (tensor.dim() - 2))], dim=1)
    return tensor[logits_to_keep] if logits_to_keep.dim() == 2 else tensor[:, logits_to_keep]


def patched_forward(row_name, class_name):
    """A forward for the class of that name in that row, to be kept in a module of `liger_kernel.transformers.model`."""
    forward = PatchedForward(rows()[row_name], class_name)

    @forward.like_original
    def lce_forward(self, *args, skip_logits=None, **kwargs):
        """The original forward, with the loss from hidden states and head weight; see liger_kernel.patch.causal_lm.

        Beyond the original's arguments: skip_logits (None: in training with labels; True without labels is an error in training,
        and gives logits in evaluation, where Trainer takes the labels away for its own loss), shift_labels (used as they are),
        num_items_in_batch, ignore_index, return_token_accuracy, return_predicted_tokens, use_token_scaling, label_smoothing,
        lse_square_scale, ce_weight, accum_dtype.
        """
        return forward(self, args, kwargs, skip_logits)

    lce_forward.__qualname__ = lce_forward.__name__ = forward.head.function
    lce_forward.__module__ = f"liger_kernel.transformers.model.{forward.head.file}"
    return lce_forward


class PatchedForward:
    """What the forward of one class needs: its table row, and the forward it stands for."""

    def __init__(self, row, class_name):
        self.head = row.heads[class_name]
        self.original = self.signature = self.output = self.function = None
        self.names = self.fields = ()
        try:
            self.modeling = importlib.import_module(row.module)
            self.original = getattr(self.modeling, class_name).forward
        except (ImportError, AttributeError):
            return  # not in the installed transformers: nothing will be bound to this forward
        from liger_kernel.transformers.model.output_classes import extended

        signature = inspect.signature(self.original)
        self.signature = _with_skip_logits(signature)
        self.names = tuple(self.signature.parameters)[1:]
        self.output = extended(_output_class(signature, self.modeling))
        self.fields = tuple(f.name for f in dataclasses.fields(self.output))

    def like_original(self, function):
        """Decorates `lce_forward`: others look for input names, `labels` and **kwargs in its signature."""
        self.function = function
        if self.signature is not None:
            function.__signature__ = self.signature
        return function

    def original_of(self, model):
        """The forward that `model` would have without ours."""
        if any(vars(cls).get("forward") is self.function for cls in type(model).__mro__):
            return functools.partial(self.original, model)
        replaced = model.__dict__.get(journal.UNDO, {}).get("forward", (journal.MISSING,))[0]
        return functools.partial(type(model).forward, model) if replaced is journal.MISSING else replaced

    def __call__(self, model, args, kwargs, skip_logits):
        """`lce_forward(model, *args, skip_logits=skip_logits, **kwargs)`."""
        arguments = self._bind(args, kwargs)
        if skip_logits is None:
            skip_logits = arguments.pop("skip_logits", None)
        labels, shift_labels = arguments.pop("labels", None), arguments.pop("shift_labels", None)
        without_labels = labels is None and shift_labels is None
        if skip_logits is None:
            skip_logits = model.training and not without_labels
        options = {name: arguments.pop(name) for name in OUR_LOSS_ARGUMENTS if arguments.get(name) is not None}
        if without_labels:
            if skip_logits and model.training:
                raise ValueError("skip_logits is True, but labels and shift_labels are None: there would be neither logits nor a loss")
            for name in HF_LOSS_ARGUMENTS:
                arguments.pop(name, None)
            return self.original_of(model)(**arguments)
        if not skip_logits and not any(value is not False and name not in _HINTS for name, value in options.items()):
            return self._with_logits(model, arguments, labels, shift_labels)
        return self._without_hf_loss(model, arguments, labels, shift_labels, skip_logits, options)

    def _bind(self, args, kwargs):
        if len(args) > len(self.names) or any(name in kwargs for name in self.names[: len(args)]):
            raise TypeError(f"forward() got {len(args)} positional arguments, or one of them again by keyword; it takes {self.signature}")
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def _with_logits(self, model, arguments, labels, shift_labels):
        """Logits and loss by the model's own forward; Hugging Face's loss prefers shift_labels but wants labels to be there."""
        if shift_labels is not None:
            arguments["shift_labels"] = shift_labels.contiguous()
        outputs = self.original_of(model)(labels=shift_labels if labels is None else labels, **arguments)
        if isinstance(outputs, tuple) or type(outputs) is self.output:
            return outputs
        return self.output(**{name: getattr(outputs, name, None) for name in self.fields})

    def _without_hf_loss(self, model, arguments, labels, shift_labels, skip_logits, options):
        from liger_kernel.transformers.model import loss_utils

        head = _at(model, self.head.head)
        return_dict = arguments.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(model.config, "return_dict", True)
        kept = arguments.pop("logits_to_keep", 0)
        loss_arguments = {name: arguments.pop(name) for name in HF_LOSS_ARGUMENTS if arguments.get(name) is not None}
        if self.head.router_loss and arguments.get("output_router_logits") is None:
            arguments["output_router_logits"] = getattr(model.config.get_text_config(), "output_router_logits", False)

        fused = skip_logits and head_weight.can_fuse(head)
        target = loss_utils.shifted(labels, loss_arguments.get("ignore_index", -100)) if shift_labels is None else shift_labels
        stats = None
        if fused and "ce_weight" not in options and isinstance(kept, int) and kept == 0:
            # Counted before the backbone runs, so that nobody waits for the counts when the loss needs them.
            target, stats = head_weight.ask_labels(head, target, loss_arguments.get("ignore_index", -100))

        outputs = _at(model, self.head.backbone)(**arguments, return_dict=True)
        length = outputs.last_hidden_state.shape[1]
        hidden = _keep(outputs.last_hidden_state, kept)
        if target.dim() == 2 and target.shape[1] == length:
            target = _keep(target, kept)

        softcap, scale = _number(model, self.head.softcap), _number(model, self.head.scale)
        loss_arguments.update(options, shift_labels=target)
        logits = None
        if fused:
            if scale is not None:
                loss_arguments["logit_scale"] = scale
            result = head_weight.fused_loss(
                head, hidden, labels, final_logit_softcapping=softcap, label_stats=stats, **loss_arguments)
        else:
            logits = head(hidden)
            logits = logits if scale is None else logits * scale
            logits = logits if softcap is None else softcap * (logits / softcap).tanh()
            result = loss_utils.liger_causal_lm_loss(logits, labels, logits.shape[-1], **loss_arguments)
        loss, _, accuracy, predicted = loss_utils.unpack_cross_entropy_result(result)

        values = {name: getattr(outputs, name, None) for name in self.fields}  # caches, hidden states, ...: the backbone's
        values.update(loss=loss, logits=None if skip_logits else logits, token_accuracy=accuracy, predicted_tokens=predicted)
        if self.head.router_loss and arguments["output_router_logits"]:
            values["aux_loss"], weighted = self._router_loss(model, outputs, arguments.get("attention_mask"))
            values["loss"] = loss + weighted.to(loss.device)
        output = self.output(**values)
        return output if return_dict else output.to_tuple()

    def _router_loss(self, model, outputs, attention_mask):
        """(load-balancing loss, the same times its coefficient), from the numbers that the model or its text config has."""
        config = model.config.get_text_config()

        def first(*names):
            return next(getattr(owner, name) for name in names for owner in (model, config) if getattr(owner, name, None) is not None)

        experts, chosen = first("num_experts", "num_local_experts", "n_routed_experts"), first("num_experts_per_tok")
        loss = self.modeling.load_balancing_loss_func(outputs.router_logits, experts, chosen, attention_mask)
        return loss, first("router_aux_loss_coef") * loss


# --- where it goes --------------------------------------------------------------------------------------------------------------


def patch_head(name, module, cls, head, flags, report):
    """Replaces the forward or the loss function of one module, whose class is `cls`, which has that head, or a subclass."""
    fused, loss, function = flags.get("fused_linear_cross_entropy"), flags.get("cross_entropy"), f"{head.file}.{head.function}"
    own = type(module).forward is not cls.forward
    if fused and not own:
        current = module.__dict__.get("forward")
        new = modules.bind_method(module, "forward", head.load())
        if new and current is not None:
            other = getattr(current, "__qualname__", current)
            report.leave(name, f"its forward had been replaced by {other}, which now serves calls without labels only")
        report.changed(new, name, f"{type(module).__name__}.forward", function)
    elif "forward" in journal.restore_module(module, "forward", "_old_forward", "__getstate__")[1]:
        report.leave(name, "its forward has been replaced by other code since, which may still call ours")
    if loss:
        report.changed(journal.set_on_module(module, "_loss_function", _LOSS.load()), name, "loss_function", _LOSS.name)
    else:
        journal.restore_module(module, "_loss_function")
    if fused and own:
        report.leave(name, f"{type(module).__name__} has a forward of its own, which the fused loss would go around")
    elif not fused and not loss:
        report.off(name, _BOTH_OFF, cls.__name__, f"{function} (all of its class)", (cls, "forward"), (cls, "_loss_function"))


def patch_head_class(cls, head, flags, user, report):
    """The same for all modules of a class, on behalf of `user`."""
    fused, loss, function = flags.get("fused_linear_cross_entropy"), flags.get("cross_entropy"), f"{head.file}.{head.function}"
    parts = ((fused, "forward", head.load(), function), (loss, "_loss_function", staticmethod(_LOSS.load()), _LOSS.name))
    for on, attribute, value, now in parts:
        if on:
            report.changed(journal.set_shared(cls, attribute, value, user), cls.__name__, attribute.strip("_"), now)
        else:
            journal.restore_shared(user, cls, attribute)
    if not fused and not loss:
        report.off(cls.__name__, _BOTH_OFF, cls.__name__, function, (cls, "forward"), (cls, "_loss_function"))
