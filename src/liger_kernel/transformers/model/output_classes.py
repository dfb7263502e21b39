"""The models' output classes with two more fields, token_accuracy and predicted_tokens.

`Liger<name>` of an output class that the installed transformers defines, in `modeling_outputs` or in a model below, is made when it
is asked for, also by pickle. Several models' classes became MultimodalCausalLMOutputWithPast; their names are gone with them."""

import dataclasses
import importlib

from transformers import modeling_outputs

_FIELDS = [(name, object, dataclasses.field(default=None)) for name in ("token_accuracy", "predicted_tokens")]


def extended(base):
    """The subclass `Liger<base>` of an output class, made once and kept in this module so that it can be pickled."""
    name = f"Liger{base.__name__}"
    if globals().get(name) is None:
        globals()[name] = dataclasses.make_dataclass(name, _FIELDS, bases=(base,), namespace={"__module__": __name__})
    return globals()[name]


# How a model's output class starts -> its folder in transformers.models
_MODELS = {
    "Gemma3": "gemma3", "Gemma4": "gemma4", "Glm4v": "glm4v", "Glm4vMoe": "glm4v_moe", "InternVL": "internvl", "Llava": "llava",
    "MuseGlimmer": "muse_glimmer", "PaliGemma": "paligemma", "Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl",
    "Qwen3VLMoe": "qwen3_vl_moe", "Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe", "SmolVLM": "smolvlm",
}


def __getattr__(name):
    base = name.removeprefix("Liger")
    if base != name and base.endswith("OutputWithPast"):
        folder, home = _MODELS.get(base.removesuffix("CausalLMOutputWithPast")), modeling_outputs
        if not hasattr(home, base) and folder:
            try:
                home = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
            except ModuleNotFoundError:  # not in the installed transformers
                pass
        if hasattr(home, base):
            return extended(getattr(home, base))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


LigerCausalLMOutputWithPast = extended(modeling_outputs.CausalLMOutputWithPast)
LigerMoeCausalLMOutputWithPast = extended(modeling_outputs.MoeCausalLMOutputWithPast)
