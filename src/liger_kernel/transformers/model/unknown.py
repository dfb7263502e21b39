"""The forwards of models without a row, made on first use: `x__Class` for a class of transformers.models.x.modeling_x whose forward
is one that `liger_kernel.patch.structure` knows."""

import importlib

from liger_kernel.patch import structure
from liger_kernel.patch.causal_lm import PatchedForward
from liger_kernel.patch.specs import Model


def __getattr__(name):
    home, _, class_name = name.partition("__")
    cls = class_name and getattr(importlib.import_module(f"transformers.models.{home}.modeling_{home}"), class_name, None)
    head = structure.head_of(cls, home) if cls else None
    if head is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    forward = PatchedForward(Model(home, heads={class_name: head}), class_name)

    @forward.like_original
    def lce_forward(self, *args, skip_logits=None, **kwargs):
        """The original forward, with the loss from hidden states and head weight; see liger_kernel.patch.causal_lm."""
        return forward(self, args, kwargs, skip_logits)

    lce_forward.__qualname__ = lce_forward.__name__ = name
    return globals().setdefault(name, lce_forward)
