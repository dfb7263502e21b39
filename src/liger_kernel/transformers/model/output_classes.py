"""The models' output classes with two more fields, token_accuracy and predicted_tokens."""

import dataclasses

from transformers import modeling_outputs

_FIELDS = [(name, object, dataclasses.field(default=None)) for name in ("token_accuracy", "predicted_tokens")]


def extended(base):
    """The subclass `Liger<base>` of an output class, made once and kept in this module so that it can be pickled."""
    name = f"Liger{base.__name__}"
    if globals().get(name) is None:
        globals()[name] = dataclasses.make_dataclass(name, _FIELDS, bases=(base,), namespace={"__module__": __name__})
    return globals()[name]


LigerCausalLMOutputWithPast = extended(modeling_outputs.CausalLMOutputWithPast)
LigerMoeCausalLMOutputWithPast = extended(modeling_outputs.MoeCausalLMOutputWithPast)
