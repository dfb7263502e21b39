"""rms_norm against its fp64 definition and against eager PyTorch."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.rms_norm import LigerRMSNorm, LigerRMSNormFunction, rms_norm
from liger_kernel.ops.rms_norm.cases import DTYPES, SHAPES, dw_bound, dx_bound, forward_bound, mode_rounding
from liger_kernel.ops.rms_norm.ref import eager, reference

MODES = ("llama", "gemma", "none")


def run(function, x, w, dy, **options):
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = function(x, w, **options)
    y.backward(dy)
    return y, x.grad, w.grad


def check(x, w, dy, mode="llama", offset=0.0, eps=1e-6):
    options = dict(eps=eps, weight_offset=offset, casting_mode=mode)
    ours = run(rms_norm, x, w, dy, **options)
    eagerly = run(eager, x, w, dy, **options)
    x64, w64, dy64 = x.double(), w.double(), dy.double()
    truth = run(reference, x64, w64, dy64, **options)
    rstd = torch.rsqrt(x64.square().mean(-1, keepdim=True) + eps)
    extra = mode_rounding(x, mode, eps)
    assert_accurate(ours[0], truth[0], forward_bound(truth[0], x, mode), eagerly[0], "y")
    assert_accurate(ours[1], truth[1], dx_bound(dy64, x64, w64 + offset, rstd, extra if mode == "none" else 0), eagerly[1], "dx")
    assert_accurate(ours[2], truth[2], dw_bound(dy64, x64 * rstd, torch.as_tensor(extra).max()), eagerly[2], "dw")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    torch.manual_seed(0)
    x, dy = torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)
    w = torch.randn(shape[-1], device=device).to(dtype)
    for mode in MODES:
        check(x, w, dy, mode)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("mode", MODES)
def test_casting_and_scale(mode, scale, device):
    """C49: each family's order of casts, at three magnitudes of bf16 and fp16 rows."""
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(1)
        x = (torch.randn(64, 512, device=device) * scale).to(dtype)
        w, dy = torch.randn(512, device=device).to(dtype), torch.randn(64, 512, device=device).to(dtype)
        check(x, w, dy, mode)
        if mode != "none":  # the families' own arithmetic, element by element, but for the order of the fp32 sum
            ours, theirs = rms_norm(x, w, casting_mode=mode).double(), eager(x, w, casting_mode=mode).double()
            assert ((ours - theirs).abs() <= 2.01 * UNIT_ROUNDOFF[dtype] * theirs.abs() * (2 if mode == "llama" else 1)).all()
            assert (ours != theirs).double().mean() < 0.01


@pytest.mark.parametrize("device", devices())
def test_offset_of_zero_weight(device):
    """C47: a Gemma weight stored around zero multiplies by 1 + w."""
    torch.manual_seed(2)
    x, dy, w = torch.randn(9, 48, device=device), torch.randn(9, 48, device=device), torch.zeros(48, device=device)
    check(x, w, dy, "gemma", offset=1.0)
    assert rms_norm(x, w, weight_offset=1.0, casting_mode="gemma").abs().max() > 0.5


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients."""
    torch.manual_seed(3)
    for dtype, cols in ((torch.bfloat16, 3584), (torch.float32, 131)):
        x, dy = torch.randn(6, cols, device=device).to(dtype), torch.randn(6, cols, device=device).to(dtype)
        w = torch.randn(cols, device=device).to(dtype)
        expected = run(rms_norm, x, w, dy)
        base = strided(x, layout).requires_grad_()
        w2 = strided(w, "offset").requires_grad_()
        y = rms_norm(base, w2)
        y.backward(strided(dy, grad_layout))
        for got, want in zip((y, base.grad, w2.grad), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=4 * UNIT_ROUNDOFF[dtype], atol=4 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize("device", devices())
def test_expanded_input_and_gradient(device):
    torch.manual_seed(4)
    x, w = torch.randn(1, 40, device=device), torch.randn(40, device=device)
    a = x.clone().requires_grad_()
    rms_norm(a.expand(5, 40), w).sum().backward()
    b = x.clone().requires_grad_()
    (5 * rms_norm(b, w)).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("device", devices())
def test_zero_rows(device):
    """C56: empty outputs, a zero weight gradient, nothing launched."""
    for shape in ((3, 0, 2520), (0, 64)):
        x = torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        w = torch.ones(shape[-1], device=device, dtype=torch.bfloat16, requires_grad=True)
        y = rms_norm(x, w)
        y.sum().backward()
        assert y.shape == x.shape and x.grad.shape == x.shape
        assert torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_weight_gradient(dtype, device):
    """C62: dW over 4096 rows is summed in fp32 and rounded once."""
    torch.manual_seed(5)
    x = torch.randn(4096, 1024, device=device).to(dtype)
    w = torch.ones(1024, device=device, dtype=dtype, requires_grad=True)
    (rms_norm(x, w, casting_mode="gemma")).backward(torch.full_like(x, 1.0))
    x64 = x.double()
    truth = (x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-6)).sum(0)
    assert ((w.grad.double() - truth).abs() <= 1.5 * UNIT_ROUNDOFF[dtype] * truth.abs() + 1e-3).all()


@pytest.mark.parametrize("device", devices())
def test_gradients_only_where_wanted_and_twice(device):
    """C87: a second backward with another upstream; a frozen weight or input costs nothing and breaks nothing."""
    torch.manual_seed(6)
    x, w = torch.randn(5, 24, device=device, requires_grad=True), torch.randn(24, device=device, requires_grad=True)
    y = rms_norm(x, w)
    dy = torch.randn_like(y)
    y.backward(dy, retain_graph=True)
    first = x.grad.clone(), w.grad.clone()
    y.backward(3 * dy)
    torch.testing.assert_close(x.grad, 4 * first[0])
    torch.testing.assert_close(w.grad, 4 * first[1])
    for frozen in (0, 1):
        inputs = [x.detach().clone(), w.detach().clone()]
        inputs[1 - frozen].requires_grad_()
        rms_norm(*inputs).backward(dy)
        torch.testing.assert_close(inputs[1 - frozen].grad, first[1 - frozen])


@pytest.mark.parametrize("device", devices())
def test_mixed_dtypes_no_weight_and_nan(device):
    torch.manual_seed(7)
    x = torch.randn(4, 96, device=device).bfloat16()
    w = torch.randn(96, device=device, requires_grad=True)
    y = rms_norm(x, w)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert w.grad.dtype == torch.float32
    plain = LigerRMSNorm(96, elementwise_affine=False).to(device)
    truth = reference(x.double(), None)
    assert_accurate(plain(x), truth, forward_bound(truth, x, "llama"), what="no weight")
    bad = torch.randn(3, 96, device=device)
    bad[1, 5] = float("nan")
    bad[2, 7] = float("inf")
    out, expected = rms_norm(bad, w), eager(bad, w)
    assert torch.equal(out.isnan(), expected.isnan())


@pytest.mark.parametrize("device", devices())
def test_errors(device):
    x, w = torch.randn(4, 8, device=device), torch.ones(8, device=device)
    before = x.clone()
    with pytest.raises(AssertionError, match="weight has 7 elements, x has 8"):
        rms_norm(x, w[:7])
    with pytest.raises(AssertionError, match="casting_mode"):
        rms_norm(x, w, casting_mode="fast")
    with pytest.raises(AssertionError, match="init_fn"):
        LigerRMSNorm(8, init_fn="random")
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        rms_norm(x.double(), w.double())
    assert torch.equal(x, before)


@pytest.mark.parametrize("device", devices())
def test_opcheck_and_compile(device):
    """C63, C66: the ops are visible to the compiler; row counts do not recompile."""
    x, w = torch.randn(4, 32, device=device), torch.randn(32, device=device)
    y, rstd = torch.ops.liger_kernel.rms_norm_forward(x, w, 1e-6, 0.0, 0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.liger_kernel.rms_norm_forward, (x, w, 1e-6, 0.0, 0), test_utils=checks)
    torch.library.opcheck(torch.ops.liger_kernel.rms_norm_backward, (y, x, w, rstd, 0.0, 0, True, True), test_utils=checks)

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda a, b: rms_norm(a, b, casting_mode="gemma", weight_offset=1.0) * 2, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        x = torch.randn(rows, 32, device=device)
        ours = run(compiled, x, w, torch.ones_like(x))
        expected = run(lambda a, b: rms_norm(a, b, casting_mode="gemma", weight_offset=1.0) * 2, x, w, torch.ones_like(x))
        for got, want in zip(ours, expected, strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    x = torch.randn(8, 32, device=device)
    inductor = torch.compile(rms_norm, fullgraph=True)
    for got, want in zip(run(inductor, x, w, torch.ones_like(x)), run(rms_norm, x, w, torch.ones_like(x)), strict=True):
        torch.testing.assert_close(got, want)


def test_every_cpu_variant(monkeypatch):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    torch.manual_seed(8)
    x, w, dy = torch.randn(5, 77).bfloat16(), torch.randn(77).bfloat16(), torch.randn(5, 77).bfloat16()
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_RMS_NORM", variant)
        try:
            check(x, w, dy)
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
    monkeypatch.setenv("LIGER_RMS_NORM", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        rms_norm(x, w)


def test_positional_apply():
    """The seven positions that other packages pass."""
    x, w = torch.randn(3, 16), torch.randn(16)
    torch.testing.assert_close(LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False, None), rms_norm(x, w))
    assert "LigerRMSNorm" in repr(LigerRMSNorm(16))
