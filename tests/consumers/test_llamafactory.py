"""LLaMA-Factory's own calls, old and new. Runs in the llamafactory environment."""

import importlib.util
import types

import pytest

if importlib.util.find_spec("llamafactory") is None:
    pytest.skip("needs llamafactory: see test_environments.py", allow_module_level=True)

from llamafactory.extras.misc import check_version
from llamafactory.model.model_utils.liger_kernel import apply_liger_kernel
from llamafactory.v1.plugins.model_plugins.kernels.liger_kernel_ops import LigerKernel

from liger_kernel.patch import compare, tiny, unpatch


def check(model_type, model, expected):
    ours = compare.run(model, **compare.inputs())
    unpatch(model)
    unpatch()
    distance = compare.distance(ours, expected)
    assert max(distance.logits, distance.loss, distance.gradients) < 1e-5, distance


@pytest.mark.parametrize("require_logits", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "glm4", "phi3", "gpt_oss", "qwen3_moe"])
def test_before_loading(model_type, require_logits):
    expected = compare.run(tiny.causal_lm(model_type), **compare.inputs())
    apply_liger_kernel(tiny.config(model_type), types.SimpleNamespace(enable_liger_kernel=True), True, require_logits)
    model = tiny.causal_lm(model_type)
    assert "Liger" in repr(model)
    check(model_type, model, expected)


@pytest.mark.parametrize("use_kernels", ["auto", ["rms_norm", "swiglu"], ["flce", "rmsnorm"]], ids=str)
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "qwen3_next"])
def test_after_loading(model_type, use_kernels, monkeypatch):
    """The project itself asks for a GPU here; the calls are the same on the CPU."""
    monkeypatch.setattr(LigerKernel, "check_deps", classmethod(lambda cls: True))
    expected = compare.run(tiny.causal_lm(model_type), **compare.inputs())
    model = tiny.causal_lm(model_type)
    assert LigerKernel.apply(model=model, use_kernels=use_kernels) is model
    assert "LigerRMSNorm" in repr(model)
    check(model_type, model, expected)


def test_the_distribution_is_found():
    check_version("liger-kernel", mandatory=True)
