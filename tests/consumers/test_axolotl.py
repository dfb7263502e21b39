"""axolotl's own plugin, as its trainer calls it before a model is loaded. Runs in the axolotl environment."""

import importlib.util

import pytest

if importlib.util.find_spec("axolotl") is None:
    pytest.skip("needs axolotl: see test_environments.py", allow_module_level=True)

from axolotl.integrations.liger import LigerArgs, LigerPlugin
from axolotl.utils.dict import DictDefault

from liger_kernel.patch import compare, tiny, unpatch


class Config(LigerArgs):
    """The keys of axolotl's configuration that the plugin's rules look at."""

    tensor_parallel_size: int = 1
    tiled_mlp: bool = False


KEYS = {"liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True}


def load(model_type, **keys):
    """A tiny model, built after the plugin's hook."""
    keys = {**KEYS, **keys}
    Config.model_validate(keys)
    cfg = DictDefault({"model_config_type": model_type, "torch_compile": False, **keys})
    plugin = LigerPlugin()
    plugin.register(cfg)
    plugin.pre_model_load(cfg)
    return tiny.causal_lm(model_type)


@pytest.mark.parametrize("loss", ["liger_fused_linear_cross_entropy", "liger_cross_entropy", None])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "mistral", "phi3", "qwen3_5_text", "granitemoe", "deepseek_v3",
                                        "stablelm"])
def test_plugin(model_type, loss):
    """The run of the model that the plugin patches is the model's own."""
    expected = compare.run(tiny.causal_lm(model_type), **compare.inputs())
    try:
        model = load(model_type, **({loss: True} if loss else {}))
    except ModuleNotFoundError as missing:
        if missing.name.startswith("liger_kernel.transformers.trainer"):
            pytest.xfail(f"{missing.name} is not provided yet")
        raise
    ours = compare.run(model, **compare.inputs())
    unpatch()
    distance = compare.distance(ours, expected)
    assert max(distance.logits, distance.loss, distance.gradients) < 1e-5, distance
    if model_type in ("llama", "qwen3", "gemma2", "mistral", "phi3"):
        assert "Liger" in repr(model)


def test_token_scaling():
    from liger_kernel.transformers import functional

    original = functional.liger_fused_linear_cross_entropy
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss as Loss

    init = Loss.__init__
    try:
        plain = compare.run(tiny.causal_lm("llama"), **compare.inputs())
        scaled = compare.run(load("llama", liger_fused_linear_cross_entropy=True, liger_use_token_scaling=True), **compare.inputs())
        assert scaled.loss < 0.1 * plain.loss  # each token times its probability
    finally:
        functional.liger_fused_linear_cross_entropy, Loss.__init__ = original, init
        unpatch()


def test_rules_of_the_keys():
    """axolotl's own checks; the keys of its documentation are accepted."""
    with pytest.raises(ValueError):
        Config.model_validate({"liger_use_token_scaling": True, "liger_fused_linear_cross_entropy": False})
    with pytest.raises(ValueError):
        Config.model_validate({"liger_swiglu": True, "liger_glu_activation": True})
    Config.model_validate({"liger_layer_norm": True, "liger_swiglu": True, "liger_kernel_impl": "cutile"})
