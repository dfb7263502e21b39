"""softmax against its fp64 definition and against eager PyTorch."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, assert_accurate, devices, strided
from liger_kernel.ops.softmax import LigerSoftmax, LigerSoftmaxFunction, liger_softmax
from liger_kernel.ops.softmax.cases import DTYPES, SHAPES, check, forward_bound, inputs, run
from liger_kernel.ops.softmax.ref import reference

pytestmark = pytest.mark.parametrize("device", devices())
MANY = 5000  # the largest error of fewer elements is chance, and no measure for another's
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    check(*inputs(shape, device, dtype), compare_eager=shape[0] * shape[1] > MANY)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_million_columns(dtype, device):
    """C26; few rows of them, and rows of one thread's or one cluster's width beside."""
    for shape in ((2, 1048576), (1, 1300003)):
        x, dy = inputs(shape, device, dtype)
        y, _ = check(x, dy, compare_eager=False)
        torch.testing.assert_close(y.double().sum(-1), torch.ones(shape[0], device=device, dtype=torch.float64), rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales(dtype, device):
    for scale in (1e-3, 1.0, 30.0, 1000.0):
        check(*inputs((9, 300), device, dtype, scale), compare_eager=False)


@pytest.mark.parametrize("cols", [40, 5000, 50257, 128256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_from_zero(dtype, cols, device):
    """Elements whose size is far above their distances: the nearest that the type can tell apart, and equal ones."""
    for top in (100.0, 3000.0, 6e4, -6e4) + ((1e6, -1e8) if dtype != torch.float16 else ()):
        x, dy = inputs((3, cols), device, dtype)
        step = torch.finfo(dtype).eps * abs(top)
        x = (top - step * torch.randint(0, 9, x.shape, device=device)).to(dtype)
        check(x, dy, compare_eager=False)


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C22, C53, C60: strided and misaligned inputs and upstream gradients."""
    for dtype, cols in ((torch.bfloat16, 3584), (torch.bfloat16, 3585), (torch.float32, 131), (torch.float16, 20)):
        x, dy = inputs((6, cols), device, dtype)
        check(strided(x, layout), strided(dy, grad_layout), compare_eager=False)


def test_leading_dimensions_and_expanded_inputs(device):
    x, dy = inputs((2, 3, 5, 40), device)
    y, dx = check(x, dy, compare_eager=False)
    vector = run(liger_softmax, x[0, 0, 0], dy[0, 0, 0])
    assert torch.equal(vector[0], y[0, 0, 0]) and torch.equal(vector[1], dx[0, 0, 0])
    check(x.permute(2, 0, 3, 1), dy.permute(2, 0, 3, 1), compare_eager=False)
    row = x[0, 0, :1].clone().requires_grad_()
    liger_softmax(row.expand(5, 40)).backward(dy[0, 0, :1].expand(5, 40))
    torch.testing.assert_close(row.grad, 5 * run(reference, x[0, 0, :1], dy[0, 0, :1])[1])
    scalar = torch.tensor(3.0, device=device, requires_grad=True)
    y = liger_softmax(scalar)
    y.backward()
    assert y == 1 and scalar.grad == 0


def test_second_backward_and_frozen_input(device):
    """C87: upstream 1 and 3 accumulate 4."""
    x, dy = inputs((9, 70), device)
    leaf = x.clone().requires_grad_()
    y = liger_softmax(leaf)
    y.backward(dy, retain_graph=True)
    first = leaf.grad.clone()
    y.backward(3 * dy)
    torch.testing.assert_close(leaf.grad, 4 * first)
    assert torch.equal(leaf, x) and not liger_softmax(x).requires_grad
    y = liger_softmax(leaf)
    y.mul_(2)  # y is saved, and autograd says so
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_repeat(device):
    """No order of additions is left to chance: results repeat bit for bit, wherever a row lies."""
    for cols in (1000, 40000):
        x, dy = inputs((50, cols), device, torch.bfloat16)
        first = run(liger_softmax, x, dy)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(run(liger_softmax, x, dy), first, strict=True))


def test_no_elements(device):
    """C56."""
    for shape in ((3, 0, 2520), (0, 64), (4, 0)):
        y, dx = run(liger_softmax, *inputs(shape, device, torch.bfloat16))
        assert y.shape == dx.shape == shape
    assert liger_softmax(torch.ones(3, device=device)).sum() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [64, 5000, 70001])
def test_nan_and_infinity(cols, dtype, device):
    """As torch: NaN and +inf spoil their row alone, and so does a row of -inf; -inf elsewhere is probability 0."""
    x, dy = inputs((7, cols), device, dtype)
    x[1, 3], x[2, cols - 1], x[3, 7], x[4, 1:] = NAN, INF, -INF, -INF
    x[5], x[6, : cols - 2] = -INF, -INF
    y, dx = run(liger_softmax, x, dy)
    plain = torch.softmax(x.double(), -1)
    assert torch.equal(y.isnan(), plain.isnan()) and torch.equal(dx.isnan(), plain.isnan())
    assert y[3, 7] == 0 and dx[3, 7] == 0 and y[4, 0] == 1 and not y[4, 1:].any()
    rows = [0, 3, 4, 6]
    torch.testing.assert_close(y[rows].double(), plain[rows], rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


def test_module_and_errors(device):
    x, _ = inputs((2, 3, 32), device)
    assert torch.equal(LigerSoftmax()(x), liger_softmax(x)) and torch.equal(LigerSoftmaxFunction.apply(x), liger_softmax(x))
    with pytest.raises(CORE_ERROR, match="softmax: takes fp32, bf16 and fp16"):
        liger_softmax(x.double())
    ops = torch.ops.liger_kernel
    with pytest.raises(CORE_ERROR, match="dy is 3 x 32, y is 2 x 32; they must be equal"):
        ops.softmax_backward(x[0], x[:, 0])
    with pytest.raises(CORE_ERROR, match="dy is bf16, y is fp32; cast dy to the dtype of y"):
        ops.softmax_backward(x.bfloat16(), x)


def test_opcheck_compile_and_autocast(device):
    """C63, C66: visible to the compiler; row counts do not recompile."""
    ops = torch.ops.liger_kernel
    x, dy = inputs((4, 32), device)
    checks = ("test_schema", "test_faketensor")
    for rows, d in ((x, dy), (x.view(2, 2, 32), dy.view(2, 2, 32))):
        torch.library.opcheck(ops.softmax_forward, (rows,), test_utils=checks)
        torch.library.opcheck(ops.softmax_backward, (d, rows), test_utils=checks)

    def model(x):
        return liger_softmax(x * 2) + x

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        tensors = inputs((rows, 32), device)
        for got, want in zip(run(compiled, *tensors), run(model, *tensors), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    for shape in ((2, 4, 32), (1, 7, 33)):
        tensors = inputs(shape, device)
        for got, want in zip(run(torch.compile(model, fullgraph=True), *tensors), run(model, *tensors), strict=True):
            torch.testing.assert_close(got, want)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert liger_softmax(x).dtype == torch.float32


def test_every_variant(monkeypatch, device):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    for variant in ("cpu", "cpu_avx2", "cpu_avx512") if device == "cpu" else ("cuda_scalar", "cuda_vector", "cuda_cluster"):
        monkeypatch.setenv("LIGER_SOFTMAX", variant)
        for shape in ((5, 64), (3, 4104), (700, 3), (3, 2056), (3, 70), (2, 33000), (2, 140000), (1, 600000)):
            for dtype in DTYPES:
                try:
                    check(*inputs(shape, device, dtype), compare_eager=False)
                except CORE_ERROR as e:
                    assert "cannot run" in str(e)
    monkeypatch.setenv("LIGER_SOFTMAX", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_softmax(inputs((2, 2), "cpu")[0])


def test_offsets_beyond_32_bits(device):
    """C79 (big): more than 2^31 elements; first, middle and last rows."""
    rows, cols = 524300, 4104
    if device == "cpu" or torch.cuda.mem_get_info(device)[0] < 5 * rows * cols * 2:
        pytest.skip("needs 25 GB of free GPU memory")
    x = torch.empty(rows, cols, device=device, dtype=torch.bfloat16).normal_()
    y = liger_softmax(x)
    picked = [0, 523_263, 523_264, rows // 2, rows - 1]
    wide = x[picked].double()
    assert_accurate(y[picked], reference(wide), forward_bound(wide))
    dx = torch.ops.liger_kernel.softmax_backward(x, y)
    saved = y[picked].double()
    want = saved * (wide - (wide * saved).sum(-1, keepdim=True))
    torch.testing.assert_close(dx[picked].double(), want, rtol=2**-7, atol=1e-6)
