"""What the layers of liger_kernel.hub find out about the classes they are bound to, over the installed transformers. Needs no
`kernels` package."""

import ast
import importlib
import pathlib

import pytest
import torch
import transformers
from torch import nn

from liger_kernel.hub import layers

MODELS = pathlib.Path(transformers.__file__).parent / "models"


# Decorated, but turned by pairs or, in some versions, the other way: their own forward runs.
OTHER_ROTATIONS = ("openai_privacy_filter", "nanochat")


def decorated(kind, names):
    """[(modelling module, name)] of the classes or functions that carry one of the Hub's layer names."""
    found = []
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text()
        if "use_kernel_forward_from_hub" not in text:
            continue
        for node in ast.parse(text).body:
            marks = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
            if isinstance(node, kind) and any(mark == f"use_kernel_forward_from_hub('{name}')" for mark in marks for name in names):
                found.append((f"transformers.models.{path.parent.name}.{path.stem}", node.name))
    return found


def load(module, name):
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None  # a modelling module that needs another package


def test_every_norm_is_known():
    """Each decorated RMSNorm class is one of the three kinds, and the kind is what its source says."""
    classes = decorated(ast.ClassDef, ["RMSNorm", "RMSNormZeroCentered"])
    assert len(classes) > 100
    unknown, kinds = [], set()
    for module, name in classes:
        cls = load(module, name)
        found = cls and layers.rms_norm_of(cls)
        if cls is not None and found is None:
            unknown.append(f"{module}.{name}")
        kinds.add(found and found[1:])
    assert not unknown, unknown
    assert kinds >= {(0.0, "llama"), (0.0, "gemma")}


def test_every_rotation_is_known():
    functions = decorated(ast.FunctionDef, ["rotary_pos_emb"])
    assert len(functions) > 90
    unknown = []
    for module, name in functions:
        function = load(module, name)
        if function is None:
            continue
        cls = type(function) if isinstance(function, nn.Module) else standing_for(function)
        if not layers.rotation_of(cls) and module.split(".")[2] not in OTHER_ROTATIONS:
            unknown.append(f"{module}.{name}")
    assert not unknown, unknown


def test_finds_the_same_with_other_defaults():
    """A default dtype or device, as loaders of large models set them."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    rotation = type(apply_rotary_pos_emb) if isinstance(apply_rotary_pos_emb, nn.Module) else standing_for(apply_rotary_pos_emb)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert layers._rms_norm_of.__wrapped__(LlamaRMSNorm) == ("variance_epsilon", 0.0, "llama")
            assert layers._rotation_of.__wrapped__(rotation) == (1.0,)
    finally:
        torch.set_default_dtype(torch.float32)


def standing_for(function):
    """The class that `kernels` makes of a function."""
    return type("Func", (nn.Module,), {"forward": lambda self, *args, **kwargs: function(*args, **kwargs)})


@pytest.mark.parametrize("wrong", ["other way", "pairs", "partial"])
def test_another_rotation_stays_as_it_is(wrong):
    def turn(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        width = cos.shape[-1]

        def one(x):
            a, b = x[..., :width].chunk(2, -1)
            half = {"other way": torch.cat((b, -a), -1), "partial": torch.cat((-b, a), -1),
                    "pairs": torch.stack((-x[..., 1:width:2], x[..., 0:width:2]), -1).flatten(-2)}[wrong]
            return torch.cat((x[..., :width] * cos + half * sin, x[..., width:]), -1)

        return one(q), one(k)

    cls = standing_for(turn)
    module = cls()
    module.forward = layers.LigerRotaryPosEmb.forward.__get__(module)
    q, k, angles = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 5, 4)
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)  # half as wide as the head
    torch.testing.assert_close(module(q, k, cos, sin), turn(q, k, cos, sin), rtol=0, atol=0)
    assert layers.rotation_of(cls) == ((1.0,) if wrong == "partial" else ())


def test_another_norm_stays_as_it_is():
    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.randn(64)), 1e-6

        def forward(self, hidden_states):
            return (hidden_states * self.weight).square()

    module, x = Squared(), torch.randn(2, 64)
    module.forward = layers.LigerRMSNorm.forward.__get__(module)
    torch.testing.assert_close(module(x), Squared.forward(module, x), rtol=0, atol=0)


@pytest.mark.parametrize("name, offset, casting", [("RoundThenScale", 0.0, "llama"), ("ScaleThenRound", 0.0, "gemma"),
                                                   ("ZeroCentered", 1.0, "gemma")])
@pytest.mark.parametrize("eps", ["variance_epsilon", "eps"])
def test_norms_of_one_kind(name, offset, casting, eps):
    module, x = nn.Module(), torch.randn(8, 64).bfloat16()
    module.weight = nn.Parameter(torch.randn(64).bfloat16())
    setattr(module, eps, 1e-5)
    hat = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    weight = module.weight
    expected = weight * hat.bfloat16() if casting == "llama" else ((offset + weight.float()) * hat).bfloat16()
    torch.testing.assert_close(getattr(layers, f"LigerRMSNorm{name}").forward(module, x), expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("activation, runs", [("silu", "LigerSwiGLUMLP"), ("gelu_pytorch_tanh", "LigerGEGLUMLP"), ("relu", None)])
def test_mlps_look_at_their_activation(activation, runs, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    module = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96, hidden_act=activation))
    x = torch.randn(2, 64)
    ran = []
    for function in ("LigerSiLUMulFunction", "LigerGELUMulFunction"):
        monkeypatch.setattr(layers.functional, function, spy(getattr(layers.functional, function), ran))
    for name in ("LigerSwiGLUMLP", "LigerGEGLUMLP"):
        ran.clear()
        torch.testing.assert_close(getattr(layers, name).forward(module, x), module(x), rtol=1e-4, atol=1e-5)
        assert bool(ran) == (name == runs)


def spy(function, ran):
    class Spy:
        @staticmethod
        def apply(*args):
            ran.append(function)
            return function.apply(*args)

    return Spy
