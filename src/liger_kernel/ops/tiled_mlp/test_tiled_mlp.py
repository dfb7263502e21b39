"""tiled_mlp against the whole layer in fp64 and eager PyTorch: values, hooks, random numbers, autocast, memory, errors, modules."""

import types

import pytest
import torch
from torch import nn

from liger_kernel.core.accuracy import assert_accurate, devices
from liger_kernel.ops.geglu.modules import LigerGEGLUMLP
from liger_kernel.ops.swiglu.modules import LigerSwiGLUMLP
from liger_kernel.ops.tiled_mlp import LigerTiledMLPFunction, apply_tiled_mlp
from liger_kernel.ops.tiled_mlp.cases import DTYPES, SHAPES, Layer, bounds, inputs
from liger_kernel.ops.tiled_mlp.modules import LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP
from liger_kernel.ops.tiled_mlp.ref import eager, reference

NAMES = ("y", "dx", "d gate", "d up", "d down")
every_device = pytest.mark.parametrize("device", devices())


def run(function, given, dy):
    leaves = [t.detach().clone().requires_grad_() for t in given]
    y = function(*leaves)
    y.backward(dy)
    return y, *(t.grad for t in leaves)


def tiled(pieces):
    return lambda x, *weights: apply_tiled_mlp(Layer.forward, Layer(*weights), x, pieces)


def check(given, pieces, seed=9):
    x, dtype = given[0], given[0].dtype
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(x.device)
    ours, theirs = run(tiled(pieces), given, dy), run(eager, given, dy)
    wide = [t.double() for t in (*given, dy)]
    pieces = pieces or -(-x.shape[-2] // x.shape[-1])
    few = x.shape[:-1].numel() <= 3  # of a few values, eager may hit one exactly
    for got, want, bound, plain, name in zip(ours, run(reference, wide[:4], wide[4]), bounds(*wide, dtype, pieces), theirs, NAMES,
                                             strict=True):
        assert got.dtype == dtype
        assert_accurate(got, want, bound, None if few else plain, name)


@every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    (*leading, hidden), inner, pieces = shape
    check(inputs(leading, hidden, inner, dtype, device), pieces)


class Counting(nn.Module):
    """x W + b through dropout, with a parameter that is not used; notes the lengths it was given."""

    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.linear, self.dropout, self.seen = nn.Linear(width, width), nn.Dropout(dropout), []
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.seen.append(x.shape[-2])
        return self.dropout(self.linear(x))


@every_device
def test_pieces(device):
    module = Counting(4).to(device)
    for tokens, pieces, lengths in ((10, 3, [4, 4, 2]), (10, None, [4, 4, 2]), (3, None, [3]), (2, 5, [1, 1]), (8, 1, [8]), (0, 2, [0])):
        module.seen.clear()
        y = apply_tiled_mlp(Counting.forward, module, torch.randn(2, tokens, 4, device=device, requires_grad=True), pieces)
        y.sum().backward()
        assert module.seen == 2 * lengths and y.shape == (2, tokens, 4)


@every_device
def test_each_parameter_gets_its_whole_gradient_once(device):
    """Hooks of DDP and others count calls; a second backward adds the same again; what is frozen or unused gets nothing."""
    module, calls = Counting(8).to(device), []
    module.linear.bias.requires_grad_(False)
    module.linear.weight.register_hook(lambda g: calls.append(g.clone()))
    x = torch.randn(2, 12, 8, device=device)
    for needs in (True, False):
        module.zero_grad()
        calls.clear()
        given = x.clone().requires_grad_(needs)
        y = apply_tiled_mlp(Counting.forward, module, given, 5)
        y.square().sum().backward(retain_graph=True)
        seen = list(calls)
        whole = x.clone().requires_grad_()
        want_x, want = torch.autograd.grad(module(whole).square().sum(), [whole, module.linear.weight])
        assert len(seen) == 1 and module.linear.bias.grad is None and module.unused.grad is None
        torch.testing.assert_close(seen[0], want)
        y.square().sum().backward()
        torch.testing.assert_close(module.linear.weight.grad, 2 * want)
        if needs:
            torch.testing.assert_close(given.grad, 2 * want_x)
    module.requires_grad_(False)
    assert not apply_tiled_mlp(Counting.forward, module, x, 5).requires_grad


@every_device
def test_a_gradient_that_is_the_upstream_one_stays_whole(device):
    """x + p: p's gradient of a piece may be a view of dy, to which nothing may be added in place."""
    p, x = nn.Parameter(torch.zeros(2, 4, device=device)), torch.randn(6, 4, device=device, requires_grad=True)
    module = nn.ParameterList([p])
    dy = torch.randn(6, 4, device=device)
    kept = dy.clone()
    apply_tiled_mlp(lambda module, part: part + module[0], module, x, 3).backward(dy)
    assert torch.equal(dy, kept) and torch.equal(x.grad, kept)
    torch.testing.assert_close(p.grad, kept.view(3, 2, 4).sum(0))


@every_device
def test_random_numbers_and_autocast_are_those_of_forward(device):
    torch.manual_seed(0)
    module, x = Counting(16, dropout=0.5).to(device), torch.randn(12, 16, device=device, requires_grad=True)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        y = apply_tiled_mlp(Counting.forward, module, x, 3)
    assert y.dtype == torch.bfloat16
    torch.rand(5, device=device)
    before = torch.rand(1)
    state = torch.get_rng_state()
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    assert torch.equal(torch.get_rng_state(), state) and before.numel() == 1
    kept = (y != 0).float() * 2  # what dropout let through, and its scale
    torch.testing.assert_close(dx, (kept.bfloat16() @ module.linear.weight.bfloat16()).float(), rtol=0.02, atol=0.02)


@every_device
def test_keeps_only_the_input(device):
    x, *weights = inputs((64,), 8, 96, device=device)
    x.requires_grad_()
    own, kept = {t.untyped_storage().data_ptr() for t in (x, *weights)}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tiled(4)(x, *weights)
    assert kept and {t.untyped_storage().data_ptr() for t in kept} <= own


def test_errors():
    x, module = torch.randn(6, 4), Counting(4)
    for arguments, error, words in (
        ((Counting.forward, module, x[0]), ValueError, "x has shape"), ((Counting.forward, module, x, 0), ValueError, "num_shards is 0"),
        ((lambda m, t: (t, t), module, x), TypeError, "fn returned tuple"), ((lambda m, t: t[:1], module, x), ValueError, "fn made"),
    ):
        with pytest.raises(error, match=f"tiled_mlp: {words}"):
            apply_tiled_mlp(*arguments)
    module.linear.weight.ds_id = 3  # as DeepSpeed marks what it has partitioned
    with pytest.raises(RuntimeError, match="ZeRO-3"):
        apply_tiled_mlp(Counting.forward, module, x)
    y = apply_tiled_mlp(Counting.forward, Counting(4), x.requires_grad_())
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="tiled_mlp: its gradient has no derivative"):
        g.sum().backward()


@every_device
def test_compile(device):
    module = LigerTiledSwiGLUMLP(config(), 3).to(device)
    x = torch.randn(2, 10, 24, device=device)
    results = []
    for function in (torch.compile(module, fullgraph=True), module):
        given = x.clone().requires_grad_()
        y = function(given)
        results.append((y, *torch.autograd.grad(y.square().sum(), [given, *module.parameters()])))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def config(**changes):
    return types.SimpleNamespace(**(dict(hidden_size=24, intermediate_size=40, hidden_act="silu") | changes))


@pytest.mark.parametrize("cls, whole, act", [(LigerTiledSwiGLUMLP, LigerSwiGLUMLP, "silu"), (LigerTiledGEGLUMLP, LigerGEGLUMLP, "gelu")])
def test_modules(cls, whole, act):
    torch.manual_seed(0)
    mine, theirs, x = cls(config(hidden_act=act), num_shards=4), whole(config(hidden_act=act)), torch.randn(2, 10, 24, requires_grad=True)
    mine.load_state_dict(theirs.state_dict())
    results = []
    for module in (mine, theirs):
        y = module(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    assert cls(config(hidden_act=act))(x).shape == x.shape  # num_shards from the shape
    with pytest.raises(ValueError, match="not supported"):
        cls(config(hidden_act="relu"))
    assert issubclass(LigerTiledMLPFunction, torch.autograd.Function)
