"""fused_moe against its fp64 definition and against eager PyTorch: values, routing, layouts, variants."""

import pytest
import torch

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.fused_moe import compute_routing_metadata, liger_fused_moe
from liger_kernel.ops.fused_moe.cases import DTYPES, SHAPES, bounds, inputs
from liger_kernel.ops.fused_moe.ref import eager, reference

NAMES = ("out", "dx", "d gate_up_proj", "d down_proj", "d top_k_weights")
every_device = pytest.mark.parametrize("device", devices())


def run(function, x, gate_up, down, index, weights, dout):
    """(out, dx, d gate_up_proj, d down_proj, d top_k_weights)"""
    leaves = [t.detach().clone().requires_grad_() for t in (x, gate_up, down, weights)]
    out = function(*leaves[:3], index, leaves[3])
    out.backward(dout)
    return out, *(t.grad for t in leaves)


def check(given, seed=9):
    x, dtype = given[0], given[0].dtype
    dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(x.device)
    ours, theirs = run(liger_fused_moe, *given, dout), run(eager, *given, dout)
    wide = [t if t.dtype == torch.int64 else t.double() for t in (*given, dout)]
    truth = run(reference, *wide)
    for got, want, bound, plain, name in zip(ours, truth, bounds(*wide, dtype), theirs, NAMES, strict=True):
        assert got.dtype == dtype
        assert_accurate(got, want, bound, plain if x.shape[0] > 3 else None, name)  # of a few values, eager may hit one exactly
    return ours


@every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    check(inputs(*shape, dtype, device))


@every_device
@pytest.mark.parametrize("tokens,experts,top_k", [(1, 1, 1), (7, 3, 2), (1000, 7, 3), (5000, 130, 8), (3, 500, 4), (0, 4, 2)])
def test_routing(tokens, experts, top_k, device):
    """A stable sort by expert, everything outside [0, E) last, tiles that cross no expert."""
    index = torch.randint(-1, experts + 2, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)).to(device)
    for given in (index, index.int(), strided(index, "every_other") if tokens else index):
        count, start, token, scatter, reverse, row, expert = compute_routing_metadata(given, experts, 16)
        assert all(t.dtype == torch.int32 and t.device == index.device for t in (count, start, token, scatter, reverse, row, expert))
        flat = index.flatten()
        flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
        by_expert, order = flat.sort(stable=True)
        assert torch.equal(scatter, order.int()) and torch.equal(token, (order // top_k).int())
        assert torch.equal(reverse[scatter.long()], torch.arange(len(flat), device=device, dtype=torch.int32))
        assert torch.equal(count, torch.bincount(flat, minlength=experts + 1)[:experts].int())
        assert torch.equal(start, torch.cat([count.new_zeros(1), count.cumsum(0, dtype=torch.int32)]))
        assert len(row) == int(((count + 15) // 16).sum())
        covered = [s for r, e in zip(row.tolist(), expert.tolist(), strict=True) for s in range(r, min(r + 16, int(start[e + 1])))]
        assert covered == list(range(int(start[-1])))
        assert torch.equal(by_expert[row.long()], expert.long())


@every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_without_tokens_and_tokens_without_experts(dtype, device):
    x, gate_up, down, _, weights = inputs(12, 16, 8, 6, 2, dtype, device)
    index = torch.tensor([[1, 4], [6, 1], [-1, 4], [7, 100]] * 3, device=device)
    index[3] = 10**12  # beyond int32
    _, dx, d_gate_up, d_down, d_weights = check((x, gate_up, down, torch.where(index.abs() > 5, 6, index), weights))
    ours = run(liger_fused_moe, x, gate_up, down, index, weights, torch.ones_like(x))
    for t in (ours[0][3::4], ours[1][3::4], ours[2][[0, 2, 3, 5]], ours[3][[0, 2, 3, 5]], ours[4][(index < 0) | (index > 5)]):
        assert t.numel() and torch.equal(t, torch.zeros_like(t))
    nobody = run(liger_fused_moe, x, gate_up, down, torch.full_like(index, 6), weights, torch.ones_like(x))
    assert all(torch.equal(t, torch.zeros_like(t)) for t in nobody)


@every_device
def test_no_tokens_and_one(device):
    for dtype in DTYPES:
        for tokens in (0, 1):
            given = inputs(tokens, 16, 8, 4, 2, dtype, device)
            if tokens:
                check(given)
                continue
            out, dx, *others = run(liger_fused_moe, *given, torch.empty(0, 16, device=device, dtype=dtype))
            assert out.shape == dx.shape == (0, 16) and all(torch.equal(t, torch.zeros_like(t)) for t in others)


@every_device
def test_a_token_may_choose_an_expert_twice(device):
    x, gate_up, down, _, weights = inputs(20, 16, 8, 4, 3, torch.float32, device)
    check((x, gate_up, down, torch.randint(0, 2, (20, 3), device=device), weights))


@every_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    """Strided and misaligned tokens, projections, choices, weights and upstream gradients."""
    for dtype, shape in ((torch.bfloat16, (40, 32, 16, 4, 2)), (torch.float32, (41, 33, 15, 5, 3))):
        given = inputs(*shape, dtype, device)
        dout = torch.randn(given[0].shape, device=device).to(dtype)
        expected = run(liger_fused_moe, *given, dout)
        leaves = [strided(t, layout).detach() for t in given]
        for i in (0, 1, 2, 4):
            leaves[i].requires_grad_()
        out = liger_fused_moe(*leaves)
        out.backward(strided(dout, layout))
        for got, want in zip((out, *(leaves[i].grad for i in (0, 1, 2, 4))), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=4 * UNIT_ROUNDOFF[dtype], atol=4 * UNIT_ROUNDOFF[dtype])
    x, gate_up, down, index, weights = inputs(8, 16, 8, 4, 2, torch.float32, device)
    a = x[:1].clone().requires_grad_()
    liger_fused_moe(a.expand(8, 16), gate_up, down, index, weights).sum().backward()  # one row eight times, one upstream number
    b = x[:1].clone().requires_grad_()
    eager(b.expand(8, 16), gate_up, down, index, weights).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


@every_device
def test_nan_stays_where_it_is(device):
    """A token's NaN reaches its own row and its experts' gradients, an expert's its own tokens; infinity as eager."""
    x, gate_up, down, index, weights = inputs(32, 16, 8, 4, 2, torch.float32, device)
    index = torch.where(index == 3, 4, index)  # nobody goes to expert 3
    for place in (x[5], gate_up[3], down[3], weights[7]):
        place.fill_(float("nan"))
    x[9, 2] = float("inf")
    dout = torch.randn_like(x)
    ours, theirs = run(liger_fused_moe, x, gate_up, down, index, weights, dout), run(eager, x, gate_up, down, index, weights, dout)
    for got, want in zip(ours[:4], theirs[:4], strict=True):
        assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(ours[4].isnan(), theirs[4].isnan() & (index < 4))


@every_device
def test_results_repeat(device):
    given = inputs(200, 64, 32, 8, 2, torch.bfloat16, device)
    dout = torch.randn(200, 64, device=device).bfloat16()
    first = run(liger_fused_moe, *given, dout)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(liger_fused_moe, *given, dout), strict=True))


@every_device
@pytest.mark.parametrize("scale", [1e-4, 1.0, 60.0])
def test_scales(scale, device):
    """Gates far in the tails of the sigmoid."""
    for dtype in (torch.float32, torch.bfloat16):
        x, *others = inputs(50, 32, 24, 4, 2, dtype, device)
        check((x * scale, *others))


@every_device
def test_long_weight_gradient(device):
    """Thousands of rows of one expert are summed in fp32 and rounded once."""
    x, gate_up, down, index, weights = inputs(4096, 32, 16, 2, 1, torch.bfloat16, device, none=False)
    dout = torch.ones_like(x)
    ours = run(liger_fused_moe, x, gate_up, down, index, weights, dout)
    wide = [t if t.dtype == torch.int64 else t.double() for t in (x, gate_up, down, index, weights, dout)]
    truth = run(reference, *wide)
    for got, want in zip(ours[2:4], truth[2:4], strict=True):
        assert (got.double() - want).norm() <= 2 * UNIT_ROUNDOFF[torch.bfloat16] * want.norm()


def test_large_offsets():
    """C79 (big): 1 079 839 rows of 2048, more than 2^31 elements, of which the last ones count."""
    slots, cols = 1_079_839, 2048
    y = torch.zeros(slots, cols, dtype=torch.bfloat16)  # untouched pages take no memory
    y[-3:] = torch.tensor([[1.0], [2.0], [4.0]])
    place = torch.arange(slots, dtype=torch.int32).view(1, slots)
    out = torch.ops.liger_kernel.fused_moe_combine(y, place, torch.tensor([0, slots - 1], dtype=torch.int32), None)
    assert torch.equal(out, torch.full((1, cols), 3.0, dtype=torch.bfloat16))


def test_every_cpu_variant(monkeypatch):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_FUSED_MOE", variant)
        try:
            for dtype in DTYPES:
                check(inputs(37, 24, 21, 5, 2, dtype))
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
    monkeypatch.setenv("LIGER_FUSED_MOE", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_fused_moe(*inputs(3, 8, 4, 2, 1))
