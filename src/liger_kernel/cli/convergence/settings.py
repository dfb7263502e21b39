"""A run's settings: model sizes by name, what the device decides, and whether a folder holds a run of the same ones."""

import json

PRESETS = {  # a body of at least 100M parameters beside its vocabulary
    "100m": dict(
        model_type="llama", vocab_size=32768, hidden_size=768, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=4096, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False),
}
CPU = {"batch": 8, "seq": 128, "precision": "fp32"}
CUDA = {"batch": 64, "seq": 1024, "precision": "bf16"}
TOKENS = {"cpu": 100_000, "cuda": 1_000_000_000}
FREE = {"minutes", "device", "folder", "part_bytes", "checkpoint"}  # may change from one call to the next of the same run


def names():
    """The models that have a name."""
    from liger_kernel.cli.step import configs

    return [*PRESETS, *configs.PRESETS]


def numbers(model):
    """The entries of a model's config; see cli/step/configs.py for what else `model` may be.

    Raises:
        ValueError: no such name, file or folder.
    """
    from liger_kernel.cli.step import configs

    entries = dict(PRESETS[model]) if model in PRESETS else configs.numbers(model, others=PRESETS)
    if "vocab_size" not in entries:
        raise ValueError(f"{model} names no vocab_size: it is no language model, or one of several parts")
    return entries


def settings(model, device, tokens, **options):
    """What both arms share; None in `options` is the device's default.

    Raises:
        ValueError: an unknown model, or no more tokens than one step takes.
    """
    entries = numbers(model)
    kind = "cpu" if device == "cpu" else "cuda"
    config = (CPU if kind == "cpu" else CUDA) | {k: v for k, v in options.items() if v is not None}
    steps = -(-(tokens or TOKENS[kind]) // (config["batch"] * config["seq"]))  # whole steps, of at least so many tokens
    if steps < 2:
        raise ValueError(f"--tokens {tokens} is no more than one step of {config['batch']} x {config['seq']}; at least two are compared")
    small = entries.get("hidden_size", 768) < 512
    config.setdefault("lr", 1e-3 if small else 6e-4)
    return config | {"name": model, "model": entries, "steps": steps, "warmup": max(1, steps // 50), "clip": 1.0}


def differences(folder, config):
    """Names of the settings in which the run that `folder` holds is another; none where it holds no run. Writes them there."""
    path = folder / "settings.json"
    own = json.loads(json.dumps({k: v for k, v in config.items() if k not in FREE}))
    if path.exists():
        there = json.loads(path.read_text())
        there["data"] = {k: v for k, v in own["data"].items() if k == "digest"} | there["data"]  # one of an older version has none
        return [f"{k} was {there.get(k)!r}, is {own.get(k)!r}" for k in sorted(there.keys() | own.keys()) if there.get(k) != own.get(k)]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(own, indent=1) + "\n")
    return []
