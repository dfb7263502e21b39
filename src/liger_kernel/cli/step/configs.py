"""The models that `liger bench step` builds: published shapes with random weights, or the config of a local folder."""

import json
import pathlib

PRESETS = {
    "llama3-8b": dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=False),
    "qwen2-7b": dict(
        model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=False),
    "qwen2-0.5b": dict(
        model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1000000.0, tie_word_embeddings=True),
    "tiny": dict(
        model_type="llama", vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False),
}


def numbers(model, layers=None, others=()):
    """The entries of a transformers config as a dict.

    Args:
        model: a preset's name, a JSON file, or a folder that holds a config.json. Nothing is downloaded.
        layers: decoder layers instead of the model's own number.
        others: names of presets that the caller has besides, for the error.

    Raises:
        ValueError: `model` is none of these, or the file names no model_type.
    """
    path = pathlib.Path(model)
    if model in PRESETS:
        found = dict(PRESETS[model])
    elif path.exists():
        path = path / "config.json" if path.is_dir() else path
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise ValueError(f"{path} is no model configuration: {e}") from None
        if not isinstance(found, dict) or "model_type" not in found:
            raise ValueError(f"{path} names no model_type")
    else:
        raise ValueError(f"{model!r} is neither one of {', '.join([*others, *PRESETS])} nor a file or folder here")
    if layers is not None:
        found["num_hidden_layers"] = layers
        if found.get("layer_types"):
            found["layer_types"] = found["layer_types"][:layers]
    return found


def config_of(entries):
    """A transformers config object."""
    from transformers import AutoConfig

    others = ("torch_dtype", "dtype", "transformers_version", "architectures", "use_cache")
    entries = {key: value for key, value in entries.items() if key not in others}
    return AutoConfig.for_model(entries.pop("model_type"), **entries, use_cache=False)
