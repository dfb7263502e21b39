"""dyt against its fp64 definition and against eager PyTorch."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, assert_accurate, devices, strided
from liger_kernel.ops.dyt import LigerDyT, LigerDyTFunction, liger_dyt
from liger_kernel.ops.dyt.cases import DTYPES, SHAPES, bounds, check, inputs, run
from liger_kernel.ops.dyt.ref import eager, reference

pytestmark = pytest.mark.parametrize("device", devices())
MANY = 5000  # the largest error of fewer elements is chance, and no measure for another's


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    check(*inputs(shape, device, dtype), compare_eager=shape[0] * shape[1] > MANY)


@pytest.mark.parametrize("parameter_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_scales_and_no_beta(dtype, parameter_dtype, device):
    for scale in (1e-3, 1.0, 30.0):
        for beta in (True, False):
            ours = check(*inputs((17, 200), device, dtype, parameter_dtype, scale, beta), compare_eager=False)
            assert [t.dtype for t in ours[:4]] == [dtype, dtype, parameter_dtype, parameter_dtype]


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients."""
    for dtype, cols in ((torch.bfloat16, 3584), (torch.float32, 131)):
        x, *parameters, dy = inputs((6, cols), device, dtype)
        check(strided(x, layout), *parameters, strided(dy, grad_layout), compare_eager=False)


def test_leading_dimensions_expanded_inputs_and_strided_parameters(device):
    x, alpha, gamma, beta, dy = inputs((2, 3, 5, 40), device)
    whole = check(x, alpha, gamma, beta, dy, compare_eager=False)
    spaced = torch.stack([gamma, beta], 1)
    got = run(liger_dyt, x, alpha.view(()), spaced[:, 0], spaced[:, 1], dy)
    assert got[2].shape == () and all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(got, whole, strict=True))
    vector = run(liger_dyt, x[0, 0, 0], alpha, gamma, beta, dy[0, 0, 0])
    assert torch.equal(vector[0], whole[0][0, 0, 0])
    row = x[0, 0, :1].clone().requires_grad_()
    liger_dyt(row.expand(5, 40), alpha, gamma, beta).backward(dy[0, 0, :1].expand(5, 40))
    torch.testing.assert_close(row.grad, 5 * run(eager, x[0, 0, :1], alpha, gamma, beta, dy[0, 0, :1])[1])


def test_gradients_only_where_wanted_and_twice(device):
    *tensors, dy = inputs((9, 70), device)
    want = run(liger_dyt, *tensors, dy)[1:]
    for i in range(4):
        leaves = [t.detach().clone() for t in tensors]
        leaves[i].requires_grad_()
        liger_dyt(*leaves).backward(dy)
        assert torch.equal(leaves[i].grad, want[i])
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = liger_dyt(*leaves)
    y.backward(dy, retain_graph=True)
    y.backward(2 * dy)
    for leaf, g in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, 3 * g)
    assert torch.equal(leaves[0], tensors[0])
    none = torch.ops.liger_kernel.dyt_backward(dy, *tensors, False, False, True, False)
    assert [t.numel() for t in none] == [0, 0, 70, 0]


def test_results_repeat(device):
    """No order of additions is left to chance: gradients repeat bit for bit."""
    tensors = inputs((3000, 264), device, torch.bfloat16)
    first = run(liger_dyt, *tensors)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(liger_dyt, *tensors), first, strict=True))


def test_parameter_gradients_of_many_rows(device):
    """C62: half precision, an upstream gradient of mean 1: rounded once, at the end."""
    *tensors, dy = inputs((4096, 256), device, torch.bfloat16)
    check(*tensors, dy + 1)


def test_no_elements(device):
    for shape in ((3, 0, 2520), (0, 64), (4, 0)):
        tensors = inputs(shape, device, torch.bfloat16)
        y, dx, dalpha, dgamma, dbeta = run(liger_dyt, *tensors)
        assert y.shape == dx.shape == shape and dgamma.shape == dbeta.shape == shape[-1:]
        assert not dalpha.any() and not dgamma.any() and not dbeta.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_infinity_and_saturation(dtype, device):
    x, alpha, gamma, beta, dy = inputs((4, 64), device, dtype)
    x[1, 3], x[2, 5], x[3, 7], x[3, 8] = float("nan"), float("inf"), -float("inf"), 30000.0
    ours, plain = run(liger_dyt, x, alpha, gamma, beta, dy), run(eager, x, alpha, gamma, beta, dy)
    for got, want in zip(ours[:2], plain[:2], strict=True):
        assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(ours[0][3], plain[0][3], rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    assert ours[1][3, 8] == 0


def test_module_and_errors(device):
    x, alpha, gamma, beta, dy = inputs((2, 3, 32), device)
    for has_beta in (True, False):
        module = LigerDyT(32, beta=has_beta, init_alpha=0.25).to(device)
        assert module.alpha.shape == (1,) and module.alpha.item() == 0.25 and module.gamma.eq(1).all()
        assert (module.beta is not None) == has_beta and f"beta={has_beta}" in repr(module)
        torch.testing.assert_close(module(x), reference(x, module.alpha, module.gamma, module.beta))
        module(x).sum().backward()
        assert all(p.grad is not None for p in module.parameters())
    assert torch.equal(LigerDyTFunction.apply(x, alpha, gamma, beta), liger_dyt(x, alpha, gamma, beta))
    with pytest.raises(CORE_ERROR, match="gamma has 31 elements in 1 dimensions, x has 32 columns"):
        liger_dyt(x, alpha, gamma[:31], beta)
    with pytest.raises(CORE_ERROR, match="beta has 31 elements"):
        liger_dyt(x, alpha, gamma, beta[:31])
    with pytest.raises(CORE_ERROR, match="alpha has 32 elements, expected 1"):
        liger_dyt(x, gamma, gamma, beta)
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        liger_dyt(x.double(), alpha, gamma, beta)


def test_opcheck_compile_and_autocast(device):
    """C63, C66: visible to the compiler; row counts do not recompile."""
    ops = torch.ops.liger_kernel
    x, alpha, gamma, beta, dy = inputs((4, 32), device)
    checks = ("test_schema", "test_faketensor")
    for rows, shift in ((x, beta), (x.view(2, 2, 32), None)):
        torch.library.opcheck(ops.dyt_forward, (rows, alpha, gamma, shift), test_utils=checks)
    torch.library.opcheck(ops.dyt_backward, (dy, x, alpha, gamma, beta, True, True, True, True), test_utils=checks)
    torch.library.opcheck(ops.dyt_backward, (dy, x, alpha, gamma, None, False, True, True, False), test_utils=checks)

    def model(x, alpha, gamma, beta):
        return liger_dyt(x * 2, alpha, gamma, beta) + x

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
        assert liger_dyt(x, alpha, gamma, beta).dtype == torch.float32


def test_every_variant(monkeypatch, device):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    for variant in ("cpu", "cpu_avx2", "cpu_avx512") if device == "cpu" else ("cuda_scalar", "cuda_vector"):
        monkeypatch.setenv("LIGER_DYT", variant)
        for shape in ((5, 64), (3, 4104), (700, 3), (3, 2056), (3, 70)):
            for dtype in DTYPES:
                try:
                    check(*inputs(shape, device, dtype), compare_eager=False)
                except CORE_ERROR as e:
                    assert "cannot run" in str(e)
    monkeypatch.setenv("LIGER_DYT", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_dyt(*inputs((2, 2), "cpu")[:4])


def test_offsets_beyond_32_bits(device):
    """C79 (big): more than 2^31 elements; first, middle and last rows."""
    rows, cols = 524300, 4104
    if device == "cpu" or torch.cuda.mem_get_info(device)[0] < 5 * rows * cols * 2:
        pytest.skip("needs 25 GB of free GPU memory")
    _, alpha, gamma, beta, _ = inputs((1, cols), device)
    x = torch.empty(rows, cols, device=device, dtype=torch.bfloat16).normal_().requires_grad_()
    y = liger_dyt(x, alpha, gamma, beta)
    y.backward(y.detach())
    picked = [0, 523_263, 523_264, rows // 2, rows - 1]
    small = x.detach()[picked].double(), alpha.double(), gamma.double(), beta.double(), y.detach()[picked].double()
    truth, allowed = run(reference, *small), bounds(*small)
    assert_accurate(y[picked], truth[0], allowed[0])
    assert_accurate(x.grad[picked], truth[1], allowed[1])
