"""mlp against its fp64 definition and against eager PyTorch; its modules against Hugging Face's and with what stands in for a linear."""

import types

import pytest
import torch
from torch import nn

from liger_kernel.core.accuracy import LAYOUTS, assert_accurate, devices, strided
from liger_kernel.ops.mlp import LigerMLPFunction, liger_mlp
from liger_kernel.ops.mlp.cases import DTYPES, SHAPES, bounds, inputs
from liger_kernel.ops.mlp.modules import LigerFalconH1MLP, LigerMLP
from liger_kernel.ops.mlp.ref import eager, reference

NAMES = ("y", "dx", "d gate", "d up", "d down")
every_device = pytest.mark.parametrize("device", devices())


def run(function, given, dy, *multipliers):
    leaves = [t.detach().clone().requires_grad_() for t in given]
    y = function(*leaves, *multipliers)
    y.backward(dy)
    return y, *(t.grad for t in leaves)


def check(given, multipliers=(), seed=9):
    x, dtype = given[0], given[0].dtype
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(x.device)
    ours, theirs = run(liger_mlp, given, dy, *multipliers), run(eager, given, dy, *multipliers)
    wide = [t.double() for t in (*given, dy)]
    truth = run(reference, wide[:4], wide[4], *multipliers)
    few = x.shape[:-1].numel() <= 3  # of a few values, eager may hit one exactly
    for got, want, bound, plain, name in zip(ours, truth, bounds(*wide, dtype, *multipliers), theirs, NAMES, strict=True):
        assert got.dtype == dtype
        assert_accurate(got, want, bound, None if few else plain, name)


@every_device
@pytest.mark.parametrize("multipliers", [(), (0.5, 1.75)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, multipliers, device):
    check(inputs(*shape, dtype, device), multipliers)


@every_device
def test_layouts(device):
    given = inputs((12,), 16, 24, device=device)
    dy = torch.randn(12, 16, device=device)
    want = run(liger_mlp, given, dy)
    for layout in LAYOUTS:
        leaves = [strided(t, layout).detach().requires_grad_() for t in given]
        y = liger_mlp(*leaves)
        y.backward(strided(dy, layout))
        for got, expected in zip((y, *(t.grad for t in leaves)), want, strict=True):
            torch.testing.assert_close(got, expected)


@every_device
def test_frozen_and_second_backward(device):
    given, dy = inputs((2, 5), 16, 24, device=device), torch.randn(2, 5, 16, device=device)
    full = run(liger_mlp, given, dy)[1:]
    for trains in (range(4), [0], [1], [2], [3], [0, 3], [1, 2]):
        leaves = [t.clone().requires_grad_(i in trains) for i, t in enumerate(given)]
        y = liger_mlp(*leaves)
        y.backward(dy, retain_graph=True)
        y.backward(2 * dy)
        for i, (leaf, g) in enumerate(zip(leaves, full, strict=True)):
            assert leaf.grad is None if i not in trains else torch.allclose(leaf.grad, 3 * g, rtol=1e-5, atol=1e-6)
    y = liger_mlp(*(t.clone().requires_grad_() for t in given))
    (g,) = torch.autograd.grad(y.sum(), y.grad_fn.next_functions[0][0].variable, create_graph=True)
    with pytest.raises(RuntimeError, match="mlp: its gradient has no derivative"):
        g.sum().backward()


@every_device
def test_saves_less_than_eager(device):
    """Input, gate and up; neither the activation nor its product."""
    x, *weights = inputs((64,), 32, 96, device=device)
    x.requires_grad_()
    own = {t.untyped_storage().data_ptr() for t in (x, *weights)}
    saved = {}
    for function in (liger_mlp, eager):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
            function(x, *(w.requires_grad_() for w in weights))
        saved[function] = sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in own)
    assert saved[liger_mlp] == 2 * 64 * 96 * 4 and saved[eager] == 4 * 64 * 96 * 4


@every_device
def test_autocast(device):
    given = inputs((6,), 16, 24, device=device)
    dy = torch.randn(6, 16, device=device).bfloat16()
    kind = torch.device(device).type
    with torch.autocast(kind, torch.bfloat16):
        ours, theirs = run(liger_mlp, given, dy), run(eager, given, dy)
    low = run(liger_mlp, [t.bfloat16() for t in given], dy)
    for got, other, same in zip(ours, theirs, low, strict=True):
        assert got.dtype == other.dtype
        torch.testing.assert_close(got, same.to(got.dtype))
        torch.testing.assert_close(got, other, rtol=0.05, atol=0.05)


def test_errors():
    x, gate, up, down = inputs((4,), 16, 24)
    for wrong in ((x.bfloat16(), gate, up, down), (x, gate.half(), up, down), tuple(t.double() for t in (x, gate, up, down)),
                  tuple(t.long() for t in (x, gate, up, down))):
        with pytest.raises(TypeError, match="mlp: "):
            liger_mlp(*wrong)
    for wrong in ((x[:, :8], gate, up, down), (x, gate, up[:8], down), (x, gate, up, down.t()), (x, gate[0], up, down)):
        with pytest.raises(ValueError, match="mlp: "):
            liger_mlp(*wrong)
    assert issubclass(LigerMLPFunction, torch.autograd.Function)


@every_device
def test_compile(device):
    given, dy = inputs((9,), 16, 24, device=device), torch.randn(9, 16, device=device)
    for got, want in zip(run(torch.compile(liger_mlp, fullgraph=True), given, dy), run(liger_mlp, given, dy), strict=True):
        torch.testing.assert_close(got, want)


def config(**changes):
    return types.SimpleNamespace(**(dict(hidden_size=24, intermediate_size=40, hidden_act="silu", mlp_multipliers=(0.5, 1.75)) | changes))


MODELS = [(LigerMLP, "llama.modeling_llama.LlamaMLP"), (LigerFalconH1MLP, "falcon_h1.modeling_falcon_h1.FalconH1MLP")]


@pytest.mark.parametrize("cls, path", MODELS, ids=["llama", "falcon_h1"])
def test_modules_against_hugging_face(cls, path):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, name = path.rsplit(".", 1)
    theirs = getattr(pytest.importorskip(f"transformers.models.{module}"), name)(config(mlp_bias=False))
    mine, x = cls(config()), torch.randn(2, 5, 24)
    mine.load_state_dict(theirs.state_dict())
    results = []
    for module in (mine, theirs):
        y = module(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert type(mine(x).grad_fn).__name__ == "LigerMLPFunctionBackward"
    for wrong in (config(mlp_bias=True), config(hidden_act="gelu")):
        with pytest.raises(ValueError, match="mlp_bias|not supported"):
            cls(wrong)


def test_what_stands_in_for_a_linear_is_called():
    """LoRA, a hook, another class: their forward counts, not their weight."""
    torch.manual_seed(0)
    x = torch.randn(3, 24)

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for change in ("class", "hook", "bias"):
        module = LigerMLP(config())
        if change == "class":
            module.up_proj.__class__ = Doubled
        elif change == "hook":
            module.up_proj.register_forward_hook(lambda m, args, out: 2 * out)
        else:
            module.up_proj = nn.Linear(24, 40)
        up = module.up_proj(x)
        torch.testing.assert_close(module(x), module.down_proj(torch.nn.functional.silu(module.gate_proj(x)) * up))
