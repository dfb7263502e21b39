"""layer_norm against its fp64 definition and against eager PyTorch."""

import pytest
import torch

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.layer_norm import layer_norm
from liger_kernel.ops.layer_norm.cases import DTYPES, SHAPES, db_bound, dw_bound, dx_bound, forward_bound
from liger_kernel.ops.layer_norm.ref import eager, fp32, reference

pytestmark = pytest.mark.parametrize("device", devices())


def run(function, x, w, b, dy, **options):
    """y and the gradients of x, w and b; None for what is None."""
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in (x, w, b)]
    y = function(*leaves, **options)
    y.backward(dy)
    return y, *(t if t is None else t.grad for t in leaves)


def check(x, w, b, dy, eager=eager, eps=1e-6, **options):
    options["eps"] = eps
    ours = run(layer_norm, x, w, b, dy, **options)
    eagerly = run(eager, x, w, b, dy, **options) if eager else [None] * 4
    x64, dy64 = x.double(), dy.double()
    w64, b64 = (t if t is None else t.double() for t in (w, b))
    truth = run(reference, x64, w64, b64, dy64, **options)
    factor = x64.new_ones(x.shape[-1]) if w is None else w64 + options.get("weight_offset", 0.0)
    assert_accurate(ours[0], truth[0], forward_bound(truth[0], x64, factor, eps), eagerly[0], "y")
    assert_accurate(ours[1], truth[1], dx_bound(dy64, x64, factor, eps), eagerly[1], "dx")
    if w is not None:
        assert ours[2].dtype == w.dtype
        assert_accurate(ours[2], truth[2], dw_bound(dy64, x64, eps), eagerly[2], "dw")
    if b is not None:
        assert ours[3].dtype == b.dtype
        assert_accurate(ours[3], truth[3], db_bound(dy64), eagerly[3], "db")


def tensors(shape, dtype, device, seed=0):
    torch.manual_seed(seed)
    x, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return x, *(torch.randn(shape[-1], device=device).to(dtype) for _ in range(2)), dy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    x, w, b, dy = tensors(shape, dtype, device)
    check(x, w, b, dy)
    check(x, w, None, dy)
    check(x, None, None, dy)
    check(x, None, b, dy)
    check(x, w, b, dy, weight_offset=1.0, eager=fp32)  # eager code adds 1 in the weight's dtype


@pytest.mark.parametrize("mean", [0.0, 1e2, -1e4, 1e6])
@pytest.mark.parametrize("cols", [37, 4096, 16384, 20483])
def test_rows_far_from_zero(cols, mean, device):
    """Neither the variance nor the centred row cancels: y is as accurate as around zero."""
    x, w, b, dy = tensors((5, cols), torch.float32, device)
    check(x + mean, w, b, dy)
    check((x + mean) * 1e-3, w, b, dy, eps=1e-12)
    constant = torch.full((2, cols), mean, device=device)
    torch.testing.assert_close(layer_norm(constant, w, b), b.expand(2, cols), rtol=0, atol=1e-4)
    for dtype in (torch.bfloat16, torch.float16):
        if abs(mean) < 1e3:
            check((x + mean).to(dtype), w.to(dtype), b.to(dtype), dy.to(dtype))


def test_one_element_far_from_the_rest(device):
    """Within the bound; eager's error depends on which of its partial sums the large square meets."""
    x, w, b, dy = tensors((4, 4096), torch.float32, device)
    x[0, 0], x[1, 77], x[2, -1] = 1e5, -3e4, 1e3
    check(x, w, b, dy, eager=None)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_scale(scale, device):
    """Magnitudes of bf16 and fp16 rows, against torch's op and against Cohere's code, element by element."""
    for dtype in (torch.bfloat16, torch.float16):
        x, w, b, dy = tensors((64, 512), dtype, device)
        x = x * scale
        check(x, w, b, dy)
        ours, theirs = layer_norm(x, w).double(), fp32(x, w).double()
        assert ((ours - theirs).abs() <= 2.01 * UNIT_ROUNDOFF[dtype] * theirs.abs()).all()
        assert (ours != theirs).double().mean() < 0.01


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients."""
    for dtype, shape in ((torch.bfloat16, (6, 3584)), (torch.float32, (6, 131)), (torch.float16, (2, 3, 72))):
        x, w, b, dy = tensors(shape, dtype, device)
        expected = run(layer_norm, x, w, b, dy)
        leaves = strided(x, layout).requires_grad_(), strided(w, "offset").requires_grad_(), strided(b, "every_other").requires_grad_()
        y = layer_norm(*leaves)
        y.backward(strided(dy, grad_layout))
        for got, want in zip((y, *(t.grad for t in leaves)), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=4 * UNIT_ROUNDOFF[dtype], atol=4 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize("cols", [3584, 3585, 3586, 3588])
def test_misaligned_rows(cols, device):
    """C60: base pointers 2 and 4 bytes off a 16-byte boundary, lengths that no vector divides."""
    x, w, b, dy = tensors((4, cols), torch.bfloat16, device)
    for offset in (1, 2):
        shifted = torch.empty(x.numel() + offset, device=device, dtype=x.dtype)[offset:].view(x.shape).copy_(x)
        check(shifted, w, b, dy)


def test_expanded_input_and_gradient(device):
    x, w, b, _ = tensors((1, 40), torch.float32, device)
    a = x.clone().requires_grad_()
    layer_norm(a.expand(5, 40), w, b).sum().backward()
    c = x.clone().requires_grad_()
    (5 * layer_norm(c, w, b)).sum().backward()
    torch.testing.assert_close(a.grad, c.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(52, 7, 64), (2, 3, 4, 48), (96,), (70000, 129)], ids=str)
def test_any_number_of_dimensions(shape, device):
    """C59: buffers are sized from the number of rows, not from a dimension."""
    check(*tensors(shape, torch.float32, device))


@pytest.mark.parametrize("cols", [64, 2520, 4096])
def test_zero_rows(cols, device):
    """C56: empty outputs, zero weight and bias gradients, nothing launched."""
    for shape in ((3, 0, cols), (0, cols), (0, cols + 1)):
        x = torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        w, b = (torch.ones(shape[-1], device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        y = layer_norm(x, w, b)
        y.sum().backward()
        assert y.shape == x.shape and x.grad.shape == x.shape
        assert torch.equal(w.grad, torch.zeros_like(w)) and torch.equal(b.grad, torch.zeros_like(b))


def test_no_columns(device):
    x = torch.zeros(3, 0, device=device, requires_grad=True)
    w = torch.ones(0, device=device, requires_grad=True)
    layer_norm(x, w).sum().backward()
    assert x.grad.shape == (3, 0) and w.grad.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_gradients_of_weight_and_bias(dtype, device):
    """C62: sums over 4096 rows are fp32 and rounded once; the same call gives the same bits."""
    x, w, b, _ = tensors((4096, 1024), dtype, device)
    dy = torch.full_like(x, 1.0)
    results = [run(layer_norm, x, w, b, dy) for _ in range(2)]
    hat = reference(x.double(), None).sum(0)
    assert ((results[0][2].double() - hat).abs() <= 1.01 * UNIT_ROUNDOFF[dtype] * hat.abs() + 1e-3).all()
    assert torch.equal(results[0][3], torch.full_like(b, 4096.0))
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_gradients_only_where_wanted_and_twice(device):
    """C87: a second backward with another upstream; a frozen tensor costs nothing and breaks nothing."""
    x, w, b, dy = tensors((5, 24), torch.float32, device)
    _, *first = run(layer_norm, x, w, b, dy)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = layer_norm(*leaves)
    y.backward(dy, retain_graph=True)
    y.backward(3 * dy)
    for leaf, grad in zip(leaves, first, strict=True):
        torch.testing.assert_close(leaf.grad, 4 * grad)
    for trained in range(1, 8):
        some = [t.clone().requires_grad_(bool(trained >> i & 1)) for i, t in enumerate((x, w, b))]
        layer_norm(*some).backward(dy)
        for leaf, grad in zip(some, first, strict=True):
            if leaf.requires_grad:
                torch.testing.assert_close(leaf.grad, grad, rtol=0, atol=0)
            else:
                assert leaf.grad is None
    (grad,) = torch.autograd.grad(layer_norm(leaves[0], w, b).square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="its gradient has no derivative"):
        grad.sum().backward()


def test_mixed_dtypes(device):
    """Every combination of dtypes gives x's dtype and gradients of each tensor's own."""
    x, w, b, dy = tensors((6, 96), torch.float32, device)
    for x_dtype in DTYPES:
        for w_dtype in DTYPES:
            for b_dtype in DTYPES:
                check(x.to(x_dtype), w.to(w_dtype), b.to(b_dtype), dy.to(x_dtype), eager=fp32)


def test_nan_and_inf_stay_in_their_rows(device):
    x, w, b, dy = tensors((4, 96), torch.float32, device)
    x[1, 5], x[2, 7] = float("nan"), float("inf")
    for cols in (96, 95):
        ours = run(layer_norm, x[:, :cols], w[:cols], b[:cols], dy[:, :cols])
        theirs = run(eager, x[:, :cols], w[:cols], b[:cols], dy[:, :cols])
        for got, want in zip(ours, theirs, strict=True):
            assert torch.equal(got.isnan(), want.isnan())


def test_errors(device):
    x, w, b, _ = tensors((4, 8), torch.float32, device)
    before = x.clone()
    with pytest.raises(ValueError, match="weight has 7 elements, x has 8"):
        layer_norm(x, w[:7])
    with pytest.raises(ValueError, match="bias has 9 elements, x has 8"):
        layer_norm(x, w, torch.zeros(9, device=device))
    with pytest.raises(CORE_ERROR, match="2 dimensions"):
        layer_norm(x, torch.ones(8, 8, device=device))
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        layer_norm(x.double(), w.double(), b.double())
    y, mean, rstd = torch.ops.liger_kernel.layer_norm_forward(x, w, b, 1e-6, 0.0)
    with pytest.raises(CORE_ERROR, match="mean and rstd"):
        torch.ops.liger_kernel.layer_norm_backward(y, x, w, b, mean.double(), rstd, 0.0, True, True, True)
    with pytest.raises(CORE_ERROR, match="dy is 3 x 8"):
        torch.ops.liger_kernel.layer_norm_backward(y[:3], x, w, b, mean, rstd, 0.0, True, True, True)
    assert torch.equal(x, before)


def test_every_cpu_variant(monkeypatch, device):
    """The variants of this machine agree with the definition; an unknown name is an error that lists them."""
    if device != "cpu":
        pytest.skip("variants of the CPU")
    x, w, b, dy = tensors((5, 77), torch.bfloat16, device)
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_LAYER_NORM", variant)
        try:
            check(x, w, b, dy)
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
    monkeypatch.setenv("LIGER_LAYER_NORM", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        layer_norm(x, w, b)
