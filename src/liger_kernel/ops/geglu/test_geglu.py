"""geglu against its fp64 definition and against eager PyTorch, in both forms of GELU."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.geglu import LigerGELUMulFunction, geglu_backward, geglu_forward, liger_geglu
from liger_kernel.ops.geglu.cases import DTYPES, SHAPES, bounds
from liger_kernel.ops.geglu.ref import reference

FORMS = ("tanh", "none")
MANY = 10_000  # the largest error of fewer elements is chance, and no measure for another's


def run(function, a, b, dc, *options):
    a, b = a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    c = function(a, b, *options)
    c.backward(dc)
    return c, a.grad, b.grad


def operands(shape, dtype, device, scale=1.0):
    return tuple((torch.randn(shape, device=device) * scale).to(dtype) for _ in range(3))


def check(a, b, dc, approximate="tanh"):
    ours, eager = run(liger_geglu, a, b, dc, approximate), run(reference, a, b, dc, approximate)
    wide = a.double(), b.double(), dc.double()
    truth = run(reference, *wide, approximate)
    allowed = bounds(wide[2], wide[0], wide[1], a.dtype)
    for got, want, bound, theirs, what in zip(ours, truth, allowed, eager, ("c", "da", "db"), strict=True):
        assert_accurate(got, want, bound, theirs if a.numel() >= MANY else None, f"{what} ({approximate})")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    torch.manual_seed(0)
    for approximate in FORMS:
        check(*operands(shape, dtype, device), approximate)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
def test_every_half_precision_gate(approximate, dtype, device):
    """All finite 16-bit gates (as fp32 too): the whole range, both tails, subnormals; NaN stays NaN."""
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    a = torch.arange(-(2**15), 2**15, device=device, dtype=torch.int32).to(torch.int16).view(half).to(dtype)
    a = a[a.isfinite() & (a.abs() < 1e12)]
    check(a.view(1, -1), torch.ones_like(a).view(1, -1), torch.ones_like(a).view(1, -1), approximate)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -200.0, 200.0], device=device, dtype=dtype)
    ones = torch.ones_like(special)
    c, da, _ = run(liger_geglu, special, ones, ones, approximate)
    assert c[0].isnan() and da[0].isnan() and c[1] == float("inf")
    assert c[3:].tolist() == [0.0, 0.0, 200.0] and da[3:].tolist() == [0.5, 0.0, 1.0]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("approximate", FORMS)
def test_tail_keeps_its_relative_accuracy(approximate, device):
    """gelu(a) for a in [-9, -1] within 1e-4 relative, where 1 + tanh and 1 + erf have cancelled to nothing; no NaN far out."""
    a = torch.linspace(-9, -1, 4001, device=device)
    wide = a.double()
    if approximate == "none":
        truth = wide * torch.special.erfc(-wide * 0.5**0.5) / 2
    else:
        truth = wide * torch.sigmoid(wide * (1.5957691216057308 + 0.07135481627260025 * wide * wide))
    ours = liger_geglu(a, torch.ones_like(a), approximate).double()
    assert ((ours - truth).abs() <= 1e-4 * truth.abs() + 1e-35).all()
    far = torch.tensor([-1e30, -1e20, 1e20, 1e30], device=device)
    c, da, db = run(liger_geglu, far, torch.ones_like(far), torch.ones_like(far), approximate)
    assert c.isfinite().all() and torch.equal(da.abs(), torch.tensor([0.0, 0.0, 1.0, 1.0], device=device)) and db.isfinite().all()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_as_eager(dtype, device):
    """The activation is rounded before the product, and for db: the same as Hugging Face's code but for rare ties."""
    torch.manual_seed(2)
    a, b, dc = operands((64, 512), dtype, device)
    for approximate in FORMS:
        ours, eager = run(liger_geglu, a, b, dc, approximate), run(reference, a, b, dc, approximate)
        for i in (0, 2):
            assert (ours[i] != eager[i]).double().mean() < 0.005


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients."""
    torch.manual_seed(3)
    for dtype, cols, approximate in ((torch.bfloat16, 3584, "tanh"), (torch.float32, 131, "none")):
        a, b, dc = operands((6, cols), dtype, device)
        expected = run(liger_geglu, a, b, dc, approximate)
        a2, b2 = strided(a, layout).detach().requires_grad_(), strided(b, "offset").requires_grad_()
        c = liger_geglu(a2, b2, approximate)
        c.backward(strided(dc, grad_layout))
        for got, want in zip((c, a2.grad, b2.grad), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=8 * UNIT_ROUNDOFF[torch.float32], atol=1e-7)


@pytest.mark.parametrize("device", devices())
def test_gradients_only_where_wanted_and_twice(device):
    """C87: a second backward with another upstream is right; a frozen operand costs nothing and breaks nothing."""
    torch.manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16):
        a, b, dc = operands((5, 24), dtype, device)
        a.requires_grad_(), b.requires_grad_()
        c = liger_geglu(a, b)
        c.backward(dc, retain_graph=True)
        first = a.grad.clone(), b.grad.clone()
        c.backward(3 * dc)
        tolerance = dict(rtol=4 * UNIT_ROUNDOFF[dtype], atol=4 * UNIT_ROUNDOFF[dtype])
        torch.testing.assert_close(a.grad, 4 * first[0], **tolerance)
        torch.testing.assert_close(b.grad, 4 * first[1], **tolerance)
        for frozen in (0, 1):
            inputs = [a.detach().clone(), b.detach().clone()]
            inputs[1 - frozen].requires_grad_()
            liger_geglu(*inputs).backward(dc)
            torch.testing.assert_close(inputs[1 - frozen].grad, first[1 - frozen])
    da, db = torch.ops.liger_kernel.geglu_backward(dc, a.detach(), b.detach(), False, False, True)
    assert da.numel() == 0 and db.shape == b.shape


@pytest.mark.parametrize("device", devices())
def test_zero_rows(device):
    """C56: empty outputs and gradients, nothing launched."""
    for shape in ((3, 0, 2520), (0, 64), (4, 0)):
        a, b = (torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        c = liger_geglu(a, b)
        c.sum().backward()
        assert c.shape == a.shape == a.grad.shape == b.grad.shape


@pytest.mark.parametrize("device", devices())
def test_errors_and_helpers(device):
    torch.manual_seed(8)
    a, b, dc = operands((2, 3, 8), torch.float32, device)
    with pytest.raises(RuntimeError, match=r"a has shape \(2, 3, 8\)"):
        liger_geglu(a, b[..., :7])
    with pytest.raises(ValueError, match="approximate is 'erf'"):
        liger_geglu(a, b, "erf")
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        liger_geglu(a.double(), b.double())
    rows_a, rows_b, c = geglu_forward(a, b)
    for got, want in zip((c, *geglu_backward(rows_a, rows_b, dc)), run(LigerGELUMulFunction.apply, a, b, dc), strict=True):
        torch.testing.assert_close(got, want)
    half = a.bfloat16().requires_grad_()
    c = liger_geglu(half, b)
    c.sum().backward()
    assert c.dtype == torch.float32 and half.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("device", devices())
def test_opcheck_and_compile(device):
    """C63, C66: the ops are visible to the compiler; row counts do not recompile."""
    ops = torch.ops.liger_kernel
    a, b, dc = operands((4, 32), torch.float32, device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.geglu_forward, (a, b, True), test_utils=checks)
    torch.library.opcheck(ops.geglu_backward, (dc, a, b, False, True, True), test_utils=checks)

    def both(a, b):
        return liger_geglu(a, b) + liger_geglu(a, b, "none")

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(both, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        arguments = operands((rows, 32), torch.float32, device)
        for got, want in zip(run(compiled, *arguments), run(both, *arguments), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    for got, want in zip(run(torch.compile(both, fullgraph=True), a, b, dc), run(both, a, b, dc), strict=True):
        torch.testing.assert_close(got, want)


def test_every_cpu_variant(monkeypatch):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    torch.manual_seed(9)
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_GEGLU", variant)
        for dtype in DTYPES:
            for approximate in FORMS:
                try:
                    check(*operands((5, 77), dtype, "cpu", 2.0), approximate)
                except CORE_ERROR as e:
                    assert "cannot run: AVX" in str(e)
    monkeypatch.setenv("LIGER_GEGLU", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_geglu(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_scalar_variant(monkeypatch):
    monkeypatch.setenv("LIGER_GEGLU", "cuda_scalar")
    torch.manual_seed(10)
    for shape in ((5, 64), (1, 5000), (700, 3), (3, 2049)):
        check(*operands(shape, torch.bfloat16, "cuda"))
