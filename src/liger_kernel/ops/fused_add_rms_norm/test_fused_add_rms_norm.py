"""fused_add_rms_norm against its fp64 definition and against eager PyTorch."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNorm, fused_add_rms_norm
from liger_kernel.ops.fused_add_rms_norm.cases import DTYPES, SHAPES, dw_bound, dx_bound, forward_bound, mode_rounding
from liger_kernel.ops.fused_add_rms_norm.ref import eager, reference

MODES = ("llama", "gemma", "none")


def ours(x, r, w, eps=1e-6, weight_offset=0.0, casting_mode="llama"):
    return fused_add_rms_norm(x, r, w, eps, weight_offset, casting_mode)


def run(function, x, r, w, dy, ds, **options):
    """(y, s, dx, dr, dw); ds None leaves s out of the backward pass."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, r, w)]
    y, s = function(*leaves, **options)
    torch.autograd.backward(*(((y,), (dy,)) if ds is None else ((y, s), (dy, ds))))
    return y, s, *(t.grad for t in leaves)


def make(rows, cols, dtype=torch.float32, device="cpu", scale=1.0, weight_dtype=None):
    x, r, dy, ds = ((torch.randn(rows, cols, device=device) * f).to(dtype) for f in (scale, scale, 1, 1))
    return x, r, torch.randn(cols, device=device).to(weight_dtype or dtype), dy, ds


def check(x, r, w, dy, ds, mode="llama", offset=0.0, eps=1e-6):
    options = dict(eps=eps, weight_offset=offset, casting_mode=mode)
    got, eagerly = run(ours, x, r, w, dy, ds, **options), run(eager, x, r, w, dy, ds, **options)
    assert torch.equal(got[1], x + r), "s is not the rounded sum"
    # The norm of the rounded s is the contract, so its truth starts from s.
    s, w64, dy64 = (x + r).double(), w.double(), dy.double()
    ds64 = torch.zeros_like(dy64) if ds is None else ds.double()
    truth = run(reference, s, torch.zeros_like(s), w64, dy64, ds64, **options)
    rstd = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    extra = mode_rounding(x + r, mode, eps)
    assert_accurate(got[0], truth[0], forward_bound(truth[0], x + r, mode, eps), eagerly[0], "y")
    bound = dx_bound(dy64, ds64, s, w64 + offset, rstd, extra if mode == "none" else 0)
    assert_accurate(got[2], truth[2], bound, eagerly[2], "dx")
    assert torch.equal(got[2], got[3]), "x and residual have different gradients"
    assert_accurate(got[4], truth[4], dw_bound(dy64, s * rstd, torch.as_tensor(extra).max()), eagerly[4], "dw")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    torch.manual_seed(0)
    x, r, w, dy, ds = make(*shape, dtype, device)
    for mode in MODES:
        check(x, r, w, dy, ds, mode)
        check(x, r, w, dy, None, mode)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("mode", MODES)
def test_casting_and_scale(mode, scale, device):
    """C49: each family's order of casts, at three magnitudes of bf16 and fp16 rows."""
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(1)
        x, r, w, dy, ds = make(64, 512, dtype, device, scale)
        check(x, r, w, dy, ds, mode)
        check(x, r, w, dy, ds, mode, offset=0.5, eps=1e-5)
        if mode != "none":  # the families' own arithmetic, element by element, but for the order of the fp32 sum
            mine, theirs = (f(x, r, w, casting_mode=mode)[0].double() for f in (ours, eager))
            assert ((mine - theirs).abs() <= 2.01 * UNIT_ROUNDOFF[dtype] * theirs.abs() * (2 if mode == "llama" else 1)).all()
            assert (mine != theirs).double().mean() < 0.01


@pytest.mark.parametrize("device", devices())
def test_many_rows(device):
    """More rows than CUDA's persistent blocks and their stages hold, for each number of vectors a thread."""
    for cols, dtype in ((256, torch.bfloat16), (1024, torch.bfloat16), (4096, torch.float32), (16384, torch.bfloat16)):
        torch.manual_seed(2)
        x, r, w, dy, ds = make(1100 if device == "cpu" else 5000, cols if device != "cpu" else min(cols, 1024), dtype, device)
        check(x, r, w, dy, ds)


@pytest.mark.parametrize("device", devices())
def test_offset_of_zero_weight(device):
    """C47: a Gemma weight stored around zero multiplies by 1 + w."""
    torch.manual_seed(3)
    x, r, w, dy, ds = make(9, 48, device=device)
    check(x, r, torch.zeros_like(w), dy, ds, "gemma", offset=1.0)
    assert ours(x, r, torch.zeros_like(w), weight_offset=1.0, casting_mode="gemma")[0].abs().max() > 0.5


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients, each of the pair in a layout of its own."""
    other, other_grad = (LAYOUTS[(LAYOUTS.index(one) + 1) % len(LAYOUTS)] for one in (layout, grad_layout))
    for dtype, cols in ((torch.bfloat16, 3584), (torch.float32, 131)):
        torch.manual_seed(4)
        x, r, w, dy, ds = make(6, cols, dtype, device)
        want = run(ours, x, r, w, dy, ds)
        leaves = strided(x, layout).requires_grad_(), strided(r, other).requires_grad_(), strided(w, "offset").requires_grad_()
        y, s = fused_add_rms_norm(*leaves)
        torch.autograd.backward((y, s), (strided(dy, grad_layout), strided(ds, other_grad)))
        for a, b in zip((y, s, *(t.grad for t in leaves)), want, strict=True):
            torch.testing.assert_close(a, b, rtol=4 * UNIT_ROUNDOFF[dtype], atol=4 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize("device", devices())
def test_misaligned_widths(device):
    """C60: hidden sizes around 3584, base pointers 2 and 4 bytes off a 16-byte boundary."""
    for cols in (3584, 3585, 3586, 3588):
        for off in (1, 2):
            torch.manual_seed(5)
            x, r, w, dy, ds = make(3, cols, torch.bfloat16, device)
            x, r = (t.new_empty(t.numel() + off)[off:].view(t.shape).copy_(t) for t in (x, r))
            check(x, r, w, dy, ds)


@pytest.mark.parametrize("device", devices())
def test_expanded_inputs_gradients_and_more_dimensions(device):
    torch.manual_seed(6)
    w, x, r = torch.randn(40, device=device), torch.randn(1, 1, 40, device=device), torch.randn(2, 5, 40, device=device)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, s = fused_add_rms_norm(a.expand(2, 5, 40), r.mT.contiguous().mT, w)
    (y.sum() + 2 * s.sum()).backward()
    y2, s2 = reference(b.expand(2, 5, 40), r, w)
    (y2.sum() + 2 * s2.sum()).backward()
    torch.testing.assert_close((y, s, a.grad), (y2, s2, b.grad))
    one, row = fused_add_rms_norm(x[0, 0], r[0, 0], w), fused_add_rms_norm(x[0], r[0, :1], w)
    assert one[0].shape == (40,) and torch.equal(one[0], row[0][0])


@pytest.mark.parametrize("device", devices())
def test_zero_rows(device):
    """C56: empty outputs, a zero weight gradient, nothing launched."""
    for shape in ((3, 0, 2520), (0, 64), (4, 0)):
        x, r = (torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        w = torch.ones(shape[-1], device=device, dtype=torch.bfloat16, requires_grad=True)
        y, s = fused_add_rms_norm(x, r, w)
        (y.sum() + s.sum()).backward()
        assert y.shape == s.shape == x.shape == x.grad.shape == r.grad.shape
        assert torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_weight_gradient(dtype, device):
    """C62: dW over 4096 rows is summed in fp32 and rounded once."""
    torch.manual_seed(7)
    x, r, _, _, _ = make(4096, 1024, dtype, device)
    w = torch.ones(1024, device=device, dtype=dtype, requires_grad=True)
    fused_add_rms_norm(x, r, w, casting_mode="gemma")[0].backward(torch.ones_like(x))
    s = (x + r).double()
    truth = (s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6)).sum(0)
    assert ((w.grad.double() - truth).abs() <= 1.5 * UNIT_ROUNDOFF[dtype] * truth.abs() + 1e-3).all()


@pytest.mark.parametrize("device", devices())
def test_weight_gradient_repeats_bit_for_bit(device):
    torch.manual_seed(8)
    x, r, w, dy, ds = make(2000, 512, torch.bfloat16, device)
    first, second = run(ours, x, r, w, dy, ds), run(ours, x, r, w, dy, ds)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", devices())
def test_mixed_dtypes_no_weight_and_nonfinite(device):
    torch.manual_seed(9)
    x, r, w, dy, ds = make(4, 96, torch.bfloat16, device, weight_dtype=torch.float32)
    check(x, r, w, dy, ds)
    assert run(ours, x, r, w, dy, ds)[4].dtype == torch.float32

    y, s = ours(x, r, None)
    truth = reference(s.double(), torch.zeros_like(s, dtype=torch.float64), None)[0]
    assert_accurate(y, truth, forward_bound(truth, s, "llama"), what="no weight")

    bad = torch.randn(4, 96, device=device)
    bad[1, 5], bad[2, 7], bad[3, 8] = float("nan"), float("inf"), float("inf")
    other = torch.zeros_like(bad)
    other[3, 8] = -float("inf")
    for got, want in zip(ours(bad, other, w), eager(bad, other, w), strict=True):
        assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)],
                         ids=str)
def test_residual_of_another_dtype(dtypes, device):
    """The sum is rounded to x's dtype once; each operand's gradient has its own dtype."""
    torch.manual_seed(10)
    x, r = (torch.randn(7, 80, device=device).to(dtype) for dtype in dtypes)
    w, dy, ds = (torch.randn(shape, device=device).to(dtypes[0]) for shape in (80, (7, 80), (7, 80)))
    total = (x.double() + r.double()).float().to(x.dtype)
    for function in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        y, s, dx, dr, dw = run(function, x, r, w, dy, ds)
        want = run(ours, total, torch.zeros_like(total), w, dy, ds)
        assert torch.equal(s, total) and torch.equal(y, want[0]) and torch.equal(dx, want[2]) and torch.equal(dw, want[4])
        assert dr.dtype == r.dtype and torch.equal(dr, dx.to(r.dtype))


@pytest.mark.parametrize("device", devices())
def test_errors(device):
    x, r, w = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device), torch.ones(8, device=device)
    before = x.clone()
    with pytest.raises(AssertionError, match="fused_add_rms_norm: weight has 7 elements, x has 8"):
        fused_add_rms_norm(x, r, w[:7])
    with pytest.raises(AssertionError, match="fused_add_rms_norm: casting_mode is 'fast'"):
        fused_add_rms_norm(x, r, w, casting_mode="fast")
    with pytest.raises(AssertionError, match="init_fn"):
        LigerFusedAddRMSNorm(8, init_fn="random")
    with pytest.raises(AssertionError, match="casting_mode"):
        LigerFusedAddRMSNorm(8, casting_mode=2)
    with pytest.raises(ValueError, match=r"x is \(4, 8\), the residual \(1, 8\); expand"):
        fused_add_rms_norm(x, r[:1], w)
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        fused_add_rms_norm(x.double(), r.double(), w.double())
    with pytest.raises(CORE_ERROR, match="residual is bf16, x is fp32; cast residual to the dtype of x"):
        torch.ops.liger_kernel.fused_add_rms_norm_forward(x, r.bfloat16(), w, 1e-6, 0.0, 0)
    with pytest.raises(CORE_ERROR, match="rounding is 2, expected"):
        torch.ops.liger_kernel.fused_add_rms_norm_forward(x, r, w, 1e-6, 0.0, 2)
    assert torch.equal(x, before)


def test_every_cpu_variant(monkeypatch):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    torch.manual_seed(11)
    x, r, w, dy, ds = make(5, 77, torch.bfloat16)
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_FUSED_ADD_RMS_NORM", variant)
        try:
            check(x, r, w, dy, ds)
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
    monkeypatch.setenv("LIGER_FUSED_ADD_RMS_NORM", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        fused_add_rms_norm(x, r, w)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_variants_agree(monkeypatch):
    torch.manual_seed(12)
    x, r, w, dy, ds = make(700, 4096, torch.bfloat16, "cuda")
    fast = run(ours, x, r, w, dy, ds)
    monkeypatch.setenv("LIGER_FUSED_ADD_RMS_NORM", "cuda_wide")
    for a, b in zip(fast, run(ours, x, r, w, dy, ds), strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-7, atol=2.0**-7)
