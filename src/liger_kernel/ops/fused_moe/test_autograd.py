"""fused_moe inside autograd, autocast and torch.compile; memory, frozen tensors, errors."""

import itertools

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.core.accuracy import CORE_ERROR, devices
from liger_kernel.ops import LigerFusedMoEFunction
from liger_kernel.ops.fused_moe import liger_fused_moe
from liger_kernel.ops.fused_moe.cases import inputs
from liger_kernel.ops.fused_moe.ref import eager

every_device = pytest.mark.parametrize("device", devices())


def leaves(given, wanted=(True,) * 4):
    x, gate_up, down, index, weights = given
    trains = iter(wanted)
    return [t if t is index else t.detach().clone().requires_grad_(next(trains)) for t in (x, gate_up, down, index, weights)]


def gradients(function, given, dout, wanted=(True,) * 4):
    tensors = leaves(given, wanted)
    out = function(*tensors)
    out.backward(dout)
    return out, *(t.grad for i, t in enumerate(tensors) if i != 3)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.name())
        return function(*arguments, **(options or {}))


@every_device
def test_frozen_inputs(device):
    """Every subset of inputs that train: the same gradients, and no product that nobody asked for."""
    given = inputs(20, 16, 8, 4, 2, device=device)
    dout = torch.randn(20, 16, device=device)
    everything = gradients(liger_fused_moe, given, dout)[1:]
    for wanted in itertools.product((True, False), repeat=4):
        if not any(wanted):
            continue
        tensors = leaves(given, wanted)
        out = liger_fused_moe(*tensors)
        with Calls() as calls:
            torch.autograd.backward(out, dout)
        for got, want, trains in zip((t.grad for i, t in enumerate(tensors) if i != 3), everything, wanted, strict=True):
            assert torch.equal(got, want) if trains else got is None
        x, gate_up, down, weights = wanted
        assert sum("weight_gradient" in name for name in calls.names) == gate_up + down
        assert sum("project" in name for name in calls.names) == x + (x or gate_up or weights)


@every_device
def test_twice(device):
    """C87: a second backward with another upstream gradient adds to the first."""
    tensors, dout = leaves(inputs(20, 16, 8, 4, 2, torch.bfloat16, device)), torch.randn(20, 16, device=device).bfloat16()
    out = liger_fused_moe(*tensors)
    trained = [t for i, t in enumerate(tensors) if i != 3]
    first = torch.autograd.grad(out, trained, dout, retain_graph=True)
    second = torch.autograd.grad(out, trained, 2 * dout)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(b, 2 * a, rtol=1e-2, atol=1e-2)


def test_memory():
    """Kept for backward: the inputs, (T K, 2I) products and integers; never (T K, H) outputs of experts."""
    tokens, hidden, inner, experts, top_k = 32, 64, 8, 4, 3
    tensors, kept = leaves(inputs(tokens, hidden, inner, experts, top_k)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        liger_fused_moe(*tensors)
    own = [t for t in kept if all(t.data_ptr() != given.data_ptr() for given in tensors)]
    floats = [t for t in own if t.is_floating_point()]
    assert [t.shape for t in floats] == [(tokens * top_k, 2 * inner)]
    assert sum(t.numel() * t.element_size() for t in own if not t.is_floating_point()) == 4 * (3 * tokens * top_k + experts + 1)


def test_no_upstream_gradient():
    """Nobody asks for the output's gradient: no input gets one."""
    tensors = leaves(inputs(5, 8, 4, 2, 1))

    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    Drop.apply(liger_fused_moe(*tensors)).sum().backward()
    assert all(t.grad is None for t in tensors)


@every_device
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_of_the_weights(weights_dtype, device):
    x, gate_up, down, index, weights = inputs(20, 16, 8, 4, 2, torch.bfloat16, device)
    given = (x, gate_up, down, index, weights.to(weights_dtype))
    dout = torch.linspace(-2, 2, 320, device=device).sin().view(20, 16).bfloat16()
    ours, theirs = gradients(liger_fused_moe, given, dout), gradients(eager, given, dout)
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype
        assert (got.double() - want.double()).norm() <= 0.02 * want.double().norm()


@every_device
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("projections", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_and_mixed_dtypes(projections, x_dtype, device):
    """Products in autocast's dtype, else in the projections'; the output in x's, gradients in each tensor's own."""
    x, gate_up, down, index, weights = inputs(40, 32, 16, 4, 2, torch.float32, device)
    given = (x.to(x_dtype), gate_up.to(projections), down.to(projections), index, weights)
    dout = torch.randn(40, 32, device=device)
    truth = gradients(eager, tuple(t if t is index else t.double() for t in given), dout.to(x_dtype).double())
    for amp in (None, torch.bfloat16):
        with torch.autocast(torch.device(device).type, dtype=amp or torch.bfloat16, enabled=amp is not None):
            tensors = leaves(given)
            out = liger_fused_moe(*tensors)
        out.backward(dout.to(x_dtype))
        assert out.dtype == x_dtype
        for got, tensor, want in zip((out, *(t.grad for i, t in enumerate(tensors) if i != 3)), (x.to(x_dtype), *given[:3], weights), truth,
                                     strict=True):
            assert got.dtype == tensor.dtype
            narrow = amp or torch.bfloat16 in (x_dtype, projections)
            assert (got.double() - want).norm() <= (0.02 if narrow else 1e-5) * want.norm()


@every_device
def test_opcheck(device):
    x, gate_up, down, index, weights = inputs(9, 16, 8, 4, 2, device=device)
    ops, checks = torch.ops.liger_kernel, ("test_schema", "test_faketensor")

    def call(op, *arguments):
        torch.library.opcheck(op, arguments, test_utils=checks)
        return op(*arguments)

    starts, token, order, place = call(ops.fused_moe_route, index, 4)
    call(ops.fused_moe_route, index.int(), 4)
    h = call(ops.fused_moe_project, x.index_select(0, token), gate_up, starts, True)
    h = torch.where(h.isfinite(), h, 0)  # slots without expert hold whatever was there
    da = call(ops.fused_moe_project, torch.zeros(18, 16, device=device), down, starts, False)
    y = torch.zeros(18, 16, device=device)
    call(ops.fused_moe_combine, y, place, starts, weights)
    call(ops.fused_moe_combine, y, place, starts, None)
    for wants in itertools.product((True, False), repeat=3):
        if wants == (True, True, True):
            starts_all = torch.tensor([0, 5, 9, 12, 18], device=device, dtype=torch.int32)
            call(ops.fused_moe_gate_gradient, torch.ones_like(da), h, order, starts_all, weights, *wants)
        ops.fused_moe_gate_gradient(da, h, order, starts, weights, *wants)
    ops.fused_moe_gate_gradient(None, h, order, starts, weights, False, True, False)
    call(ops.fused_moe_weight_gradient, torch.ones(18, 8, device=device), y, starts)


@every_device
def test_compile(device):
    """One graph, whatever the routing; row counts do not recompile after the second."""
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda *a: liger_fused_moe(*a) * 2, fullgraph=True, backend=counter)
    for tokens in (3, 5, 6, 9, 17):
        given = inputs(tokens, 16, 8, 4, 2, device=device, seed=tokens)
        dout = torch.randn(tokens, 16, device=device)
        for got, want in zip(gradients(compiled, given, dout), gradients(lambda *a: liger_fused_moe(*a) * 2, given, dout), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    given, dout = inputs(8, 16, 8, 4, 2, torch.bfloat16, device), torch.randn(8, 16, device=device).bfloat16()
    inductor = torch.compile(liger_fused_moe, fullgraph=True)
    for got, want in zip(gradients(inductor, given, dout), gradients(liger_fused_moe, given, dout), strict=True):
        torch.testing.assert_close(got, want)


@every_device
def test_errors(device):
    x, gate_up, down, index, weights = given = inputs(5, 8, 4, 2, 1, device=device)
    before = [t.clone() for t in given]
    wrong = [
        ((x[None], gate_up, down, index, weights), ValueError, "have 3, 3, 3 and 2 dimensions"),
        ((x[:, :7], gate_up, down, index, weights), ValueError, r"x is \(5, 7\), gate_up_proj \(2, 8, 8\)"),
        ((x, gate_up[:, :6], down, index, weights), ValueError, r"gate_up_proj \(2, 6, 8\), down_proj \(2, 8, 4\)"),
        ((x, gate_up, down[:1], index, weights), ValueError, r"down_proj \(1, 8, 4\)"),
        ((x, gate_up, down, index[:4], weights[:4]), ValueError, r"x has 5 rows, top_k_index is \(4, 1\)"),
        ((x, gate_up, down, index, weights[:, :0]), ValueError, r"top_k_weights \(5, 0\)"),
        ((x, gate_up, down, index.float(), weights), TypeError, "top_k_index is torch.float32"),
        ((x, gate_up, down.half(), index, weights), TypeError, "down_proj torch.float16"),
        ((x.double(), gate_up.double(), down.double(), index, weights), CORE_ERROR, "fp32, bf16 and fp16"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            liger_fused_moe(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_positional_apply():
    given = inputs(6, 8, 4, 3, 2)
    assert torch.equal(LigerFusedMoEFunction.apply(*given), liger_fused_moe(*given))
    assert torch.equal(LigerFusedMoEFunction.apply(*given[:3], given[3].int(), given[4]), liger_fused_moe(*given))
