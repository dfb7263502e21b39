"""relu_squared against its fp64 definition and against eager PyTorch."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, assert_accurate, devices, strided
from liger_kernel.ops.relu_squared import (
    LigerReLUSquared,
    LigerReLUSquaredFunction,
    liger_relu_squared,
    relu_squared_backward,
    relu_squared_forward,
)
from liger_kernel.ops.relu_squared.cases import DTYPES, SHAPES, bounds
from liger_kernel.ops.relu_squared.ref import eager, reference

pytestmark = pytest.mark.parametrize("device", devices())


def run(function, x, dy):
    x = x.detach().requires_grad_()
    y = function(x)
    y.backward(dy)
    return y, x.grad


def operands(shape, dtype, device, scale=1.0):
    torch.manual_seed(0)
    return tuple((torch.randn(shape, device=device) * scale).to(dtype) for _ in range(2))


def check(x, dy):
    ours, eagerly = run(liger_relu_squared, x, dy), run(eager, x, dy)
    truth = run(reference, x.double(), dy.double())
    for got, want, bound, theirs, what in zip(ours, truth, bounds(dy.double(), x.double()), eagerly, ("y", "dx"), strict=True):
        assert_accurate(got, want, bound, theirs, what)
        assert torch.equal(got, theirs), what  # one product, rounded once: the same bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    for scale in (1e-3, 1.0, 100.0):
        check(*operands(shape, dtype, device, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(dtype, device):
    """NaN, infinities, zeros and overflow as eager code, also in the upstream gradient: an infinite one is 0 where x <= 0."""
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, torch.finfo(dtype).max / 4,
               torch.finfo(dtype).tiny]
    x, dy = torch.cartesian_prod(*[torch.tensor(special, device=device)] * 2).to(dtype).unbind(1)
    for got, want in zip(run(liger_relu_squared, x, dy), run(eager, x, dy), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients."""
    for dtype, cols in ((torch.bfloat16, 3584), (torch.float32, 131)):
        x, dy = operands((6, cols), dtype, device)
        expected = run(liger_relu_squared, x, dy)
        for got, want in zip(run(liger_relu_squared, strided(x, layout), strided(dy, grad_layout)), expected, strict=True):
            assert torch.equal(got, want)


def test_expanded(device):
    row, dy = operands((1, 1, 40), torch.float32, device)
    x = row.clone().requires_grad_()
    liger_relu_squared(x.expand(2, 5, 40)).backward(dy.expand(2, 5, 40))
    torch.testing.assert_close(x.grad, 10 * run(eager, row, dy)[1])


def test_second_backward_and_values(device):
    x, dy = operands((3, 40), torch.float32, device)
    leaf = x.clone().requires_grad_()
    y = liger_relu_squared(leaf)
    y.backward(dy, retain_graph=True)
    y.backward(2 * dy)
    torch.testing.assert_close(leaf.grad, 3 * run(eager, x, dy)[1])
    assert torch.equal(leaf, x) and not liger_relu_squared(x).requires_grad
    with torch.no_grad():  # a value that changed since forward is an error, not a wrong gradient
        stale = leaf.mul(1).requires_grad_()
    y = liger_relu_squared(stale)
    with torch.no_grad():
        stale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_zero_rows(device):
    for shape in ((3, 0, 2520), (0, 64), (4, 0), (0,)):
        x = torch.zeros(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        y = liger_relu_squared(x)
        y.sum().backward()
        assert y.shape == x.shape == x.grad.shape


def test_names_and_errors(device):
    x, dy = operands((2, 3, 8), torch.bfloat16, device)
    y, dx = run(liger_relu_squared, x, dy)
    assert torch.equal(LigerReLUSquared()(x), y) and torch.equal(LigerReLUSquaredFunction.apply(x), y)
    assert torch.equal(relu_squared_forward(x), y) and torch.equal(relu_squared_backward(x, dy), dx)
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        liger_relu_squared(x.double())
    with pytest.raises(CORE_ERROR, match="dy is 4 x 8, x is 6 x 8"):
        torch.ops.liger_kernel.relu_squared_backward(dy.view(6, 8)[:4], x.view(6, 8))


def test_against_transformers(device):
    activations = pytest.importorskip("transformers.activations")
    x, dy = operands((5, 64), torch.bfloat16, device)
    for got, want in zip(run(liger_relu_squared, x, dy), run(activations.ACT2FN["relu2"], x, dy), strict=True):
        assert torch.equal(got, want)


def test_opcheck_compile_and_autocast(device):
    """C63, C66: visible to the compiler; row counts do not recompile."""
    ops = torch.ops.liger_kernel
    x, dy = operands((4, 32), torch.float32, device)
    for target, arguments in ((ops.relu_squared_forward, (x,)), (ops.relu_squared_backward, (dy, x))):
        torch.library.opcheck(target, arguments, test_utils=("test_schema", "test_faketensor"))

    def model(x):
        return liger_relu_squared(x * 2) + x

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        arguments = operands((rows, 32), torch.float32, device)
        for got, want in zip(run(compiled, *arguments), run(model, *arguments), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    for got, want in zip(run(torch.compile(model, fullgraph=True), x, dy), run(model, x, dy), strict=True):
        torch.testing.assert_close(got, want)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert liger_relu_squared(x).dtype == torch.float32


def test_every_variant(monkeypatch, device):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    for variant in ("cpu", "cpu_avx2", "cpu_avx512") if device == "cpu" else ("cuda_scalar", "cuda_vector"):
        monkeypatch.setenv("LIGER_RELU_SQUARED", variant)
        for shape in ((5, 64), (1, 5000), (700, 3), (3, 2056)):
            for dtype in DTYPES:
                try:
                    check(*operands(shape, dtype, device))
                except CORE_ERROR as e:
                    assert "cannot run" in str(e)
    monkeypatch.setenv("LIGER_RELU_SQUARED", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_relu_squared(torch.ones(2, 2))


def test_offsets_beyond_32_bits(device):
    """C79 (big): more than 2^31 elements; first, middle and last rows."""
    rows, cols = 65536, 36864
    if device == "cpu" or torch.cuda.mem_get_info(device)[0] < 5 * rows * cols * 2:
        pytest.skip("needs 25 GB of free GPU memory")
    x = torch.empty(rows, cols, device=device, dtype=torch.bfloat16).normal_()
    picked = [0, 58_253, 58_254, rows // 2, rows - 1]
    y = liger_relu_squared(x)
    assert torch.equal(y[picked], eager(x[picked]))
    dx = torch.ops.liger_kernel.relu_squared_backward(y, x)
    assert torch.equal(dx[picked], run(eager, x[picked], y[picked])[1])
