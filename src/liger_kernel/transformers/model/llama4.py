"""The forwards of patched Llama4ForCausalLM and Llama4ForConditionalGeneration models."""

import functools
import inspect
import types

from liger_kernel.patch.causal_lm import PatchedForward, patched_forward
from liger_kernel.patch.models import rows


class _WithoutHead:
    """A Llama4ForConditionalGeneration for its own forward, but that the causal model in it gives hidden states, not logits."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def language_model(self, **arguments):
        self.outputs = self._model.language_model.model(**{**arguments, "return_dict": True})
        return (self.outputs.last_hidden_state,)


class _Conditional(PatchedForward):
    """Images enter the text in this forward itself, not in a backbone that could be called in its place."""

    def _without_hf_loss(self, model, *rest):
        view = types.SimpleNamespace(
            config=model.config, language_model=model.language_model, hidden_states=functools.partial(self._hidden_states, model))
        return super()._without_hf_loss(view, *rest)

    def _with_logits(self, model, arguments, labels, shift_labels):
        return self._without_hf_loss(model, arguments, labels, shift_labels, False, {})  # the original passes shift_labels on to the text

    def _hidden_states(self, model, **arguments):
        view = _WithoutHead(model)
        inspect.unwrap(self.original)(view, **{**arguments, "return_dict": False})
        return view.outputs


lce_forward = patched_forward("llama4", "Llama4ForCausalLM")

_forward = _Conditional(rows()["llama4"], "Llama4ForConditionalGeneration")


@_forward.like_original
def lce_forward_conditional_generation(self, *args, skip_logits=None, **kwargs):
    """The original forward, with the loss from hidden states and head weight; see liger_kernel.patch.causal_lm."""
    return _forward(self, args, kwargs, skip_logits)
