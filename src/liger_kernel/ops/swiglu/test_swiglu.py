"""swiglu against its fp64 definition and against eager PyTorch."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops import swiglu as op
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction, liger_swiglu
from liger_kernel.ops.swiglu.cases import DTYPES, SHAPES, bounds
from liger_kernel.ops.swiglu.ref import eager, packed, reference


def run(function, a, b, dc, *options):
    a, b = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    c = function(a, b, *options)
    c.backward(dc)
    return c, a.grad, b.grad


def operands(shape, dtype, device, scale=1.0):
    return tuple((torch.randn(shape, device=device) * scale).to(dtype) for _ in range(3))


MANY = 10_000  # the largest error of fewer elements is chance, and no measure for another's


def check(a, b, dc, *multipliers):
    ours, eagerly = run(liger_swiglu, a, b, dc, *multipliers), run(eager, a, b, dc, *multipliers)
    wide = a.double(), b.double(), dc.double()
    truth = run(reference, *wide, *multipliers)
    for got, want, bound, theirs, what in zip(ours, truth, bounds(wide[2], wide[0], wide[1], a.dtype, *multipliers), eagerly,
                                              ("c", "da", "db"), strict=True):
        assert_accurate(got, want, bound, theirs if a.numel() >= MANY else None, what)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    torch.manual_seed(0)
    check(*operands(shape, dtype, device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_multipliers_and_scales(dtype, device):
    torch.manual_seed(1)
    for scale in (1e-3, 1.0, 30.0):
        a, b, dc = operands((17, 200), dtype, device, scale)
        check(a, b, dc)
        check(a, b, dc, 0.25, -1.75)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_half_precision_gate(dtype, device):
    """All finite 16-bit gates (as fp32 too): the whole range, both tails, subnormals; and NaN and infinities as eager code."""
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    a = torch.arange(-(2**15), 2**15, device=device, dtype=torch.int32).to(torch.int16).view(half).to(dtype)
    a = a[a.isfinite() & (a.abs() < 1e30)]
    check(a.view(1, -1), torch.ones_like(a).view(1, -1), torch.ones_like(a).view(1, -1))
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -200.0, 200.0], device=device, dtype=dtype)
    ones = torch.ones_like(special)
    for got, want in zip(run(liger_swiglu, special, ones, ones), run(eager, special, ones, ones), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=4 * UNIT_ROUNDOFF[dtype], atol=1e-30)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_as_eager(dtype, device):
    """The activation is rounded before the product, as in Hugging Face models: results are the same but for rare ties."""
    torch.manual_seed(2)
    a, b, _ = operands((64, 512), dtype, device)
    assert (liger_swiglu(a, b) != eager(a, b)).double().mean() < 0.005


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients."""
    torch.manual_seed(3)
    for dtype, cols in ((torch.bfloat16, 3584), (torch.float32, 131)):
        a, b, dc = operands((6, cols), dtype, device)
        expected = run(liger_swiglu, a, b, dc)
        a2, b2 = strided(a, layout).detach().requires_grad_(), strided(b, "offset").requires_grad_()
        c = liger_swiglu(a2, b2)
        c.backward(strided(dc, grad_layout))
        for got, want in zip((c, a2.grad, b2.grad), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=8 * UNIT_ROUNDOFF[torch.float32], atol=1e-7)


@pytest.mark.parametrize("device", devices())
def test_expanded_and_batched(device):
    torch.manual_seed(4)
    row, b = torch.randn(1, 1, 40, device=device), torch.randn(2, 5, 40, device=device)
    a = row.clone().requires_grad_()
    liger_swiglu(a.expand(2, 5, 40), b).sum().backward()
    expected = row.clone().requires_grad_()
    eager(expected.expand(2, 5, 40), b).sum().backward()
    torch.testing.assert_close(a.grad, expected.grad)
    vector = torch.randn(9, device=device)
    torch.testing.assert_close(liger_swiglu(vector, vector), eager(vector, vector))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(dtype, device):
    """Both halves of one matrix, aligned or not, contiguous or not; in place and not."""
    torch.manual_seed(5)
    for shape in ((6, 2 * 3584), (2, 3, 2 * 77), (4, 2), (5, 2 * 3588)):
        y = torch.randn(shape, device=device).to(dtype)
        dc = torch.randn(*shape[:-1], shape[-1] // 2, device=device).to(dtype)
        a, b = y.chunk(2, dim=-1)
        want = run(liger_swiglu, a, b, dc)
        for layout in ("contiguous", "sliced", "every_other"):
            for in_place in (False, True):
                leaf = strided(y, layout).detach().requires_grad_()
                c = LigerFusedGateUpSiLUMulFunction.apply(leaf * 1.0 if in_place else leaf, in_place)
                c.backward(dc)
                torch.testing.assert_close(c, want[0], rtol=1e-6, atol=1e-7)
                torch.testing.assert_close(leaf.grad, torch.cat(want[1:], dim=-1), rtol=1e-6, atol=1e-7)
        truth, theirs = packed(y.double()), packed(y)
        bound = bounds(dc.double(), a.double(), b.double(), dtype)[0]
        assert_accurate(LigerFusedGateUpSiLUMulFunction.apply(y), truth, bound, theirs)


@pytest.mark.parametrize("device", devices())
def test_packed_second_backward(device):
    """C87: right without in_place, an error with it; a leaf is never its own gradient."""
    torch.manual_seed(6)
    y, dc = torch.randn(4, 48, device=device, requires_grad=True), torch.randn(4, 24, device=device)
    c = LigerFusedGateUpSiLUMulFunction.apply(y)
    c.backward(dc, retain_graph=True)
    first = y.grad.clone()
    c.backward(3 * dc)
    torch.testing.assert_close(y.grad, 4 * first)
    for make in (lambda: y.detach().clone().requires_grad_(), lambda: y.detach().clone().requires_grad_() * 1.0):
        z = make()
        c = LigerFusedGateUpSiLUMulFunction.apply(z, True)
        (dz,) = torch.autograd.grad(c, z, dc, retain_graph=True)
        torch.testing.assert_close(dz, first)
        assert not z.is_leaf or (torch.equal(z, y) and z._version == 0)
        with pytest.raises(RuntimeError, match="second backward after in_place"):
            torch.autograd.grad(c, z, dc)


@pytest.mark.parametrize("device", devices())
def test_packed_in_place_only_where_nobody_sees_it(device):
    """Parameters and views of them keep their values; rows that share memory get the gradients of rows that do not."""
    torch.manual_seed(12)
    weight, dc = torch.randn(4, 12, 48, device=device), torch.randn(4, 24, device=device)
    views = (lambda w: w[:, 0], lambda w: w[0, :4], lambda w: w[1].narrow(0, 2, 4), lambda w: w.view(48, 48)[:4], lambda w: w[:, :][:, 3])
    for view in views:
        leaf, same = weight.clone().requires_grad_(), weight.clone().requires_grad_()
        LigerFusedGateUpSiLUMulFunction.apply(view(leaf), True).backward(dc)
        packed(view(same)).backward(dc)
        assert torch.equal(leaf, weight)
        torch.testing.assert_close(leaf.grad, same.grad)
    shared = (lambda w: w[0, :1].expand(4, 48), lambda w: w.view(-1).as_strided((4, 48), (8, 1)),
              lambda w: w.view(-1).as_strided((4, 48), (0, 1)), lambda w: w[0, 0].expand(2, 2, 48),
              lambda w: w.view(-1).as_strided((2, 2, 48), (48, 24, 1)))
    for view in shared:
        leaf, same = weight.clone().requires_grad_(), weight.clone().requires_grad_()
        upstream = dc.view(*view(weight).shape[:-1], 24)
        LigerFusedGateUpSiLUMulFunction.apply(view(leaf * 1.0), True).backward(upstream)
        packed(view(same * 1.0)).backward(upstream)
        torch.testing.assert_close(leaf.grad, same.grad)
        rows = view(weight.clone())
        torch.testing.assert_close(op.swiglu_fused_gate_up_backward(rows, upstream, in_place=True), op.swiglu_fused_gate_up_backward(
            rows.contiguous(), upstream))
    leaf = weight.clone().requires_grad_()
    with torch.no_grad():
        op.swiglu_fused_gate_up_backward(leaf[:, 0], dc, in_place=True)
    assert torch.equal(leaf, weight)
    y = weight[:, 0].clone().requires_grad_() * 1.0  # and it is in place where it may be
    memory = y.data_ptr()
    (dy,) = torch.autograd.grad(LigerFusedGateUpSiLUMulFunction.apply(y, True), y, dc)
    assert dy.data_ptr() == memory and y._version == 1


@pytest.mark.parametrize("device", devices())
def test_gradients_only_where_wanted_and_twice(device):
    """C87: a second backward with another upstream is right; a frozen operand costs nothing and breaks nothing."""
    torch.manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16):
        a, b, dc = operands((5, 24), dtype, device)
        a.requires_grad_(), b.requires_grad_()
        c = liger_swiglu(a, b)
        before = a.detach().clone(), b.detach().clone()
        c.backward(dc, retain_graph=True)
        first = a.grad.clone(), b.grad.clone()
        c.backward(3 * dc)
        tolerance = dict(rtol=4 * UNIT_ROUNDOFF[dtype], atol=4 * UNIT_ROUNDOFF[dtype])
        torch.testing.assert_close(a.grad, 4 * first[0], **tolerance)
        torch.testing.assert_close(b.grad, 4 * first[1], **tolerance)
        assert torch.equal(a, before[0]) and torch.equal(b, before[1])
        for frozen in (0, 1):
            inputs = [a.detach().clone(), b.detach().clone()]
            inputs[1 - frozen].requires_grad_()
            liger_swiglu(*inputs).backward(dc)
            torch.testing.assert_close(inputs[1 - frozen].grad, first[1 - frozen])
    da, db = torch.ops.liger_kernel.swiglu_backward(dc, a.detach(), b.detach(), 1.0, 1.0, True, False)
    assert da.shape == a.shape and db.numel() == 0


@pytest.mark.parametrize("device", devices())
def test_zero_rows(device):
    """C56: empty outputs and gradients, nothing launched."""
    for shape in ((3, 0, 2520), (0, 64), (4, 0)):
        a, b = (torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        c = liger_swiglu(a, b)
        c.sum().backward()
        assert c.shape == a.shape == a.grad.shape == b.grad.shape
    y = torch.zeros(0, 64, device=device, requires_grad=True)
    c = LigerFusedGateUpSiLUMulFunction.apply(y)
    c.sum().backward()
    assert c.shape == (0, 32) and y.grad.shape == (0, 64)


@pytest.mark.parametrize("device", devices())
def test_mixed_dtypes(device):
    torch.manual_seed(8)
    a, b = torch.randn(4, 40, device=device).bfloat16().requires_grad_(), torch.randn(4, 40, device=device, requires_grad=True)
    c = liger_swiglu(a, b)
    c.sum().backward()
    assert c.dtype == torch.float32 and a.grad.dtype == torch.bfloat16 and b.grad.dtype == torch.float32
    torch.testing.assert_close(c, eager(a.float(), b))


@pytest.mark.parametrize("device", devices())
def test_errors(device):
    a = torch.randn(4, 8, device=device)
    with pytest.raises(RuntimeError, match=r"a has shape \(4, 8\), b \(4, 7\)"):
        liger_swiglu(a, a[:, :7])
    with pytest.raises(ValueError, match="7 columns, expected an even number"):
        LigerFusedGateUpSiLUMulFunction.apply(a[:, :7])
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        liger_swiglu(a.double(), a.double())


@pytest.mark.parametrize("device", devices())
def test_opcheck_and_compile(device):
    """C63, C65, C66: the ops are visible to the compiler; neither row counts nor multipliers recompile."""
    ops = torch.ops.liger_kernel
    a, b, dc = operands((4, 32), torch.float32, device)
    y = torch.cat([a, b], 1)
    checks = ("test_schema", "test_faketensor")
    for target, arguments in ((ops.swiglu_forward, (a, b, 1.0, 0.5)), (ops.swiglu_backward, (dc, a, b, 1.0, 0.5, True, True)),
                              (ops.swiglu_backward, (dc, a, b, 1.0, 0.5, False, True)), (ops.swiglu_packed_forward, (y, 1.0, 1.0)),
                              (ops.swiglu_packed_backward, (dc, y, 1.0, 1.0)), (ops.swiglu_packed_backward_, (dc, y, 1.0, 1.0))):
        torch.library.opcheck(target, arguments, test_utils=checks)

    def fused(a, b):
        gate_up = torch.cat([a, b], dim=-1)
        return LigerFusedGateUpSiLUMulFunction.apply(gate_up) * liger_swiglu(a, b, 0.5, 2.0)

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(fused, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        arguments = operands((rows, 32), torch.float32, device)
        for got, want in zip(run(compiled, *arguments), run(fused, *arguments), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    inductor = torch.compile(fused, fullgraph=True)
    for got, want in zip(run(inductor, a, b, dc), run(fused, a, b, dc), strict=True):
        torch.testing.assert_close(got, want)

    def in_place(a, b):
        return LigerFusedGateUpSiLUMulFunction.apply(torch.cat([a, b], dim=-1), True)

    for got, want in zip(run(torch.compile(in_place, fullgraph=True), a, b, dc), run(liger_swiglu, a, b, dc), strict=True):
        torch.testing.assert_close(got, want)


def test_every_cpu_variant(monkeypatch):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    torch.manual_seed(9)
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_SWIGLU", variant)
        for dtype in DTYPES:
            try:
                check(*operands((5, 77), dtype, "cpu", 4.0))
            except CORE_ERROR as e:
                assert "cannot run: AVX" in str(e)
    monkeypatch.setenv("LIGER_SWIGLU", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_swiglu(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_scalar_variant(monkeypatch):
    monkeypatch.setenv("LIGER_SWIGLU", "cuda_scalar")
    torch.manual_seed(10)
    for shape in ((5, 64), (1, 5000), (700, 3), (3, 2049)):
        check(*operands(shape, torch.bfloat16, "cuda"))


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 60 << 30, reason="needs a GPU of 60 GB")
def test_offsets_beyond_32_bits():
    """C79 (big): 80000 x 36864 bf16, 2.9e9 elements; first, middle and last rows."""
    rows, cols = 80_000, 36_864
    a = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    picked = [0, 58_253, 58_254, rows // 2, rows - 1]
    c = torch.ops.liger_kernel.swiglu_forward(a, b, 1.0, 1.0)
    torch.testing.assert_close(c[picked], eager(a[picked], b[picked]))
    da, db = torch.ops.liger_kernel.swiglu_backward(c, a, b, 1.0, 1.0, True, True)
    expected = run(eager, a[picked], b[picked], c[picked])
    for got, want in ((da[picked], expected[1]), (db[picked], expected[2])):
        torch.testing.assert_close(got, want, rtol=4 * UNIT_ROUNDOFF[torch.bfloat16], atol=1e-2)
    del da, db, b
    torch.cuda.empty_cache()
    y = a.view(rows, cols)  # packed: rows of 2 x 18432, so that the strided path crosses 2^31 too
    c = torch.ops.liger_kernel.swiglu_packed_forward(y, 1.0, 1.0)
    torch.testing.assert_close(c[picked], packed(y[picked]))


def test_helpers_and_reference_names(monkeypatch):
    torch.manual_seed(11)
    a, b, dc = operands((2, 3, 8), torch.float32, "cpu")
    rows_a, rows_b, c = op.swiglu_forward(a, b, 0.5)
    assert rows_a.shape == (6, 8) and c.shape == a.shape
    da, db = op.swiglu_backward(rows_a, rows_b, dc, 0.5)
    for got, want in zip((c, da, db), run(liger_swiglu, a, b, dc, 0.5), strict=True):
        torch.testing.assert_close(got, want)
    y = torch.cat([a, b], -1)
    same, c = op.swiglu_fused_gate_up_forward(y)
    assert same is y
    torch.testing.assert_close(c, liger_swiglu(a, b))
    dy = op.swiglu_fused_gate_up_backward(y, dc)
    over = y.clone()
    result = op.swiglu_fused_gate_up_backward(over, dc, in_place=True)
    assert torch.equal(result, dy) and result.data_ptr() == over.data_ptr()
    torch.testing.assert_close(LigerSiLUMulFunction.apply(a, b), liger_swiglu(a, b))
    assert not op._should_tile(1 << 20)
    monkeypatch.setattr(op, "infer_device_arch", lambda: "blackwell_ultra")
    assert op._should_tile(16384) and op._should_tile(8193) and not op._should_tile(8192)
