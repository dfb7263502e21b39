"""poly_norm against its fp64 definition and against eager PyTorch."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, assert_accurate, devices, strided
from liger_kernel.ops.poly_norm import LigerPolyNorm, LigerPolyNormFunction, liger_poly_norm, poly_norm_backward, poly_norm_forward
from liger_kernel.ops.poly_norm.cases import DTYPES, SHAPES, bounds, check, inputs, run
from liger_kernel.ops.poly_norm.ref import eager, reference

pytestmark = pytest.mark.parametrize("device", devices())
MANY = 5000  # the largest error of fewer elements is chance, and no measure for another's


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    check(*inputs(shape, device, dtype), compare_eager=shape[0] * shape[1] > MANY)


@pytest.mark.parametrize("parameter_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_scales_and_eps(dtype, parameter_dtype, device):
    for scale, eps in ((1e-2, 1e-6), (1.0, 1e-3), (30.0, 1e-6)):
        ours = check(*inputs((17, 200), device, dtype, parameter_dtype, scale), compare_eager=False, eps=eps)
        assert [t.dtype for t in ours] == [dtype, dtype, parameter_dtype, parameter_dtype]


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients."""
    for dtype, cols in ((torch.bfloat16, 3584), (torch.float32, 131)):
        x, weight, bias, dy = inputs((6, cols), device, dtype)
        check(strided(x, layout), weight, bias, strided(dy, grad_layout), compare_eager=False)


def test_leading_dimensions_and_expanded_inputs(device):
    x, weight, bias, dy = inputs((2, 3, 5, 40), device)
    whole = run(liger_poly_norm, x, weight, bias, dy)
    rows = run(liger_poly_norm, x.view(30, 40), weight, bias, dy.view(30, 40))
    for got, want in zip(whole, rows, strict=True):
        assert torch.equal(got.flatten(), want.flatten())
    row = x[0, 0, :1].clone().requires_grad_()
    liger_poly_norm(row.expand(5, 40), weight, bias).backward(dy[0, 0, :1].expand(5, 40))
    torch.testing.assert_close(row.grad, 5 * run(eager, x[0, 0, :1], weight, bias, dy[0, 0, :1])[1], rtol=1e-4, atol=1e-5)
    vector = run(liger_poly_norm, x[0, 0, 0], weight, bias, dy[0, 0, 0])
    assert torch.equal(vector[0], whole[0][0, 0, 0])
    for shape in ((1,), (1, 1)):  # a bias of any one-element shape, a weight of any stride
        spaced = torch.stack([weight, weight], 1)[:, 0]
        got = run(liger_poly_norm, x, spaced, bias.view(shape), dy)
        assert got[3].shape == shape and all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(got, whole, strict=True))


def test_gradients_only_where_wanted_and_twice(device):
    x, weight, bias, dy = inputs((9, 70), device)
    want = run(liger_poly_norm, x, weight, bias, dy)[1:]
    for i in range(3):
        tensors = [t.detach().clone() for t in (x, weight, bias)]
        tensors[i].requires_grad_()
        liger_poly_norm(*tensors).backward(dy)
        assert torch.equal(tensors[i].grad, want[i])
    tensors = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = liger_poly_norm(*tensors)
    y.backward(dy, retain_graph=True)
    y.backward(2 * dy)
    for t, g in zip(tensors, want, strict=True):
        torch.testing.assert_close(t.grad, 3 * g)
    assert torch.equal(tensors[0], x)
    ops = torch.ops.liger_kernel
    rstd = ops.poly_norm_forward(x, weight, bias, 1e-6)[1]
    assert [t.numel() for t in ops.poly_norm_backward(dy, x, weight, bias, rstd, False, False, True)] == [0, 0, 1]


def test_results_repeat(device):
    """No order of additions is left to chance: gradients repeat bit for bit."""
    tensors = inputs((3000, 264), device, torch.bfloat16)
    first = run(liger_poly_norm, *tensors)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(liger_poly_norm, *tensors), first, strict=True))


def test_weight_gradient_of_many_rows(device):
    """C62: half precision, an upstream gradient of mean 1: rounded once, at the end."""
    x, weight, bias, dy = inputs((4096, 256), device, torch.bfloat16)
    check(x, weight, bias, dy + 1)


def test_no_elements(device):
    for shape in ((3, 0, 2520), (0, 64), (4, 0)):
        x, weight, bias, dy = inputs(shape, device, torch.bfloat16)
        y, dx, dw, db = run(liger_poly_norm, x, weight, bias, dy)
        assert y.shape == dx.shape == x.shape and not dw.any() and not db.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(dtype, device):
    """They spoil their own row as in eager code, and no other."""
    x, weight, bias, dy = inputs((4, 64), device, dtype)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    y, dx, _, _ = run(liger_poly_norm, x, weight, bias, dy)
    plain = run(eager, x, weight, bias, dy)
    for got, want in ((y, plain[0]), (dx, plain[1])):
        assert torch.equal(got.isnan(), want.isnan())


def test_module_helpers_and_errors(device):
    x, weight, bias, dy = inputs((2, 3, 32), device)
    module = LigerPolyNorm(eps=1e-5, in_place=False).to(device)
    assert "weight_shape=(3,), eps=1e-05, in_place=False" in repr(module)
    assert module.bias.shape == () and module.bias.item() == 1 and torch.allclose(module.weight, torch.full((3,), 1 / 3, device=device))
    torch.testing.assert_close(module(x), reference(x, module.weight, module.bias, 1e-5))
    want = run(liger_poly_norm, x, weight, bias, dy)
    y, *saved = poly_norm_forward(x, weight, bias, 1e-6)
    dx, dw, db = poly_norm_backward(dy, *saved)
    for a, b in zip((y, dx, dw, db.view(())), want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(LigerPolyNormFunction.apply(x, weight, bias), want[0])
    with pytest.raises(AssertionError, match="weight has 2 elements"):
        liger_poly_norm(x, weight[:2], bias)
    with pytest.raises(AssertionError, match="bias has 3 elements"):
        liger_poly_norm(x, weight, weight)
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        liger_poly_norm(x.double(), weight, bias)


def test_opcheck_compile_and_autocast(device):
    """C63, C66: visible to the compiler; row counts do not recompile."""
    ops = torch.ops.liger_kernel
    x, weight, bias, dy = inputs((4, 32), device)
    rstd = ops.poly_norm_forward(x, weight, bias, 1e-6)[1]
    checks = ("test_schema", "test_faketensor")
    for rows in (x, x.view(2, 2, 32)):
        torch.library.opcheck(ops.poly_norm_forward, (rows, weight, bias, 1e-6), test_utils=checks)
    for wanted in ((True, True, True), (False, True, False)):
        torch.library.opcheck(ops.poly_norm_backward, (dy, x, weight, bias, rstd, *wanted), test_utils=checks)

    def model(x, weight, bias, eps):
        return liger_poly_norm(x * 2, weight, bias, eps) + x

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        tensors = inputs((rows, 32), device)
        for got, want in zip(run(compiled, *tensors), run(model, *tensors), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    tensors = inputs((2, 4, 32), device)
    for got, want in zip(run(torch.compile(model, fullgraph=True), *tensors), run(model, *tensors), strict=True):
        torch.testing.assert_close(got, want)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert liger_poly_norm(x, weight, bias).dtype == torch.float32


def test_every_variant(monkeypatch, device):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    for variant in ("cpu", "cpu_avx2", "cpu_avx512") if device == "cpu" else ("cuda_wide", "cuda_registers"):
        monkeypatch.setenv("LIGER_POLY_NORM", variant)
        for shape in ((5, 64), (3, 4104), (700, 3), (3, 2056), (2, 16384)):
            for dtype in DTYPES:
                try:
                    check(*inputs(shape, device, dtype), compare_eager=False)
                except CORE_ERROR as e:
                    assert "cannot run" in str(e)
    monkeypatch.setenv("LIGER_POLY_NORM", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_poly_norm(*inputs((2, 2), "cpu")[:3])


def test_offsets_beyond_32_bits(device):
    """C79 (big): more than 2^31 elements; first, middle and last rows."""
    rows, cols = 524300, 4104
    if device == "cpu" or torch.cuda.mem_get_info(device)[0] < 5 * rows * cols * 2:
        pytest.skip("needs 25 GB of free GPU memory")
    _, weight, bias, _ = inputs((1, 8), device)
    x = torch.empty(rows, cols, device=device, dtype=torch.bfloat16).normal_().requires_grad_()
    y = liger_poly_norm(x, weight, bias)
    y.backward(y.detach())
    picked = [0, 523_263, 523_264, rows // 2, rows - 1]
    small = x.detach()[picked].double(), weight.double(), bias.double(), y.detach()[picked].double()
    truth, allowed = run(reference, *small), bounds(*small)
    assert_accurate(y[picked], truth[0], allowed[0])
    assert_accurate(x.grad[picked], truth[1], allowed[1])
