"""The MLP modules of geglu against Hugging Face's classes, and their forwards bound to those."""

import types

import pytest
import torch

from liger_kernel.ops.geglu.modules import LigerGEGLUMLP, LigerGEGLUMLPForGemma4


def config(**changes):
    values = dict(hidden_size=24, intermediate_size=40, hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh")
    return types.SimpleNamespace(**(values | changes))


@pytest.mark.parametrize("path", ["gemma.modeling_gemma.GemmaMLP", "gemma2.modeling_gemma2.Gemma2MLP", "gemma3.modeling_gemma3.Gemma3MLP"])
def test_against_hugging_face(path):
    pytest.importorskip("transformers")
    module, name = path.rsplit(".", 1)
    theirs = getattr(pytest.importorskip(f"transformers.models.{module}"), name)(config())
    ours = LigerGEGLUMLP(config())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 24)
    expected = theirs(x)
    torch.testing.assert_close(ours(x), expected)
    theirs.forward = types.MethodType(LigerGEGLUMLP.forward, theirs)
    torch.testing.assert_close(theirs(x), expected)
    expected.sum().backward()
    first = theirs.gate_proj.weight.grad.clone()
    theirs.gate_proj.weight.grad = None
    theirs(x).sum().backward()
    torch.testing.assert_close(theirs.gate_proj.weight.grad, first)


def test_gemma4_width():
    shared = config(use_double_wide_mlp=True, num_kv_shared_layers=2, num_hidden_layers=6)
    assert [LigerGEGLUMLPForGemma4(shared, i).intermediate_size for i in (None, 0, 3, 4, 5)] == [40, 40, 40, 80, 80]
    for plain in (config(), config(use_double_wide_mlp=False, num_kv_shared_layers=2, num_hidden_layers=6),
                  config(use_double_wide_mlp=True, num_kv_shared_layers=0, num_hidden_layers=6)):
        assert LigerGEGLUMLPForGemma4(plain, 5).intermediate_size == 40
    x = torch.randn(3, 24)
    module = LigerGEGLUMLPForGemma4(shared, 5)
    gate, up = module.gate_proj(x), module.up_proj(x)
    torch.testing.assert_close(module(x), module.down_proj(torch.nn.functional.gelu(gate, approximate="tanh") * up))
