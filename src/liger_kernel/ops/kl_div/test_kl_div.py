"""kl_div against its fp64 definition and against torch's loss."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, devices, strided
from liger_kernel.ops.kl_div import LigerKLDIVLoss, LigerKLDivLossFunction, liger_kl_div
from liger_kernel.ops.kl_div.cases import DTYPES, REDUCTIONS, SHAPES, check, inputs, run
from liger_kernel.ops.kl_div.ref import reference

pytestmark = [pytest.mark.parametrize("device", devices()), pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")]
INF, NAN = float("inf"), float("nan")
either = pytest.mark.parametrize("log_target", [False, True], ids=["probabilities", "logarithms"])
each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@either
@each_reduction
def test_shapes(shape, dtype, log_target, reduction, device):
    check(*inputs(shape, device, dtype, log_target=log_target), reduction=reduction, log_target=log_target)


@either
@each_reduction
def test_no_worse_than_torch(log_target, reduction, device):
    for dtype in DTYPES:
        check(*inputs((300, 1000), device, dtype, log_target=log_target), True, reduction=reduction, log_target=log_target)


@either
@each_reduction
def test_dtypes_may_differ(log_target, reduction, device):
    for dtype in DTYPES:
        for other in DTYPES:
            check(*inputs((9, 70), device, dtype, other, log_target), reduction=reduction, log_target=log_target)


@each_reduction
def test_upstream_gradients(reduction, device):
    """C19: of other size than one; fp16's survives 1 / elements when a loss scale comes from above."""
    for dtype in DTYPES:
        for upstream in (-2.5, 65536.0, 0.0):
            check(*inputs((40, 1000), device, dtype), upstream=upstream if dtype != torch.float16 or reduction != "sum" else 3.0,
                  reduction=reduction)
    x, y = inputs((64, 4096), device, torch.float16)
    grad = run(liger_kl_div, x, y, 65536.0, reduction="mean")[1]
    torch.testing.assert_close(grad.float(), -y.float() * (65536 / x.numel()), rtol=2e-3, atol=1e-7)


@either
def test_eps(log_target, device):
    x, y = inputs((9, 70), device, log_target=log_target)
    for eps in (0.0, 1e-10, 0.1):
        loss, _ = check(x, y, reduction="sum", log_target=log_target, eps=eps)
        assert log_target or eps < 0.1 or loss != liger_kl_div(x, y, reduction="sum")


@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, target_layout, device):
    """C22: strided and misaligned operands, and upstream gradients of the elements."""
    for dtype, cols in ((torch.bfloat16, 3584), (torch.float32, 131), (torch.bfloat16, 5001)):
        x, y = inputs((6, cols), device, dtype)
        for reduction in ("none", "batchmean"):
            check(strided(x, layout), strided(y, target_layout), reduction=reduction)
        leaf = x.clone().requires_grad_()
        dy = torch.randn(6, cols, device=device)
        liger_kl_div(leaf, y, reduction="none").backward(strided(dy, layout))
        torch.testing.assert_close(leaf.grad, (-y.float() * dy).to(dtype))


def test_leading_dimensions_and_expanded_operands(device):
    x, y = inputs((2, 3, 5, 40), device)
    for reduction in REDUCTIONS:
        check(x, y, reduction=reduction)
        check(x.transpose(1, 3), y.transpose(1, 3), reduction=reduction)
        check(x[0, 0, 0], y[0, 0, 0], reduction=reduction)
        torch.testing.assert_close(liger_kl_div(x, y, reduction=reduction), torch.nn.functional.kl_div(x, y, reduction=reduction))
    row = x[0, 0, :1].clone().requires_grad_()
    liger_kl_div(row.expand(5, 40), y[0, 0], reduction="sum").backward()
    torch.testing.assert_close(row.grad, -y[0, 0].sum(0, keepdim=True))
    scalar = torch.tensor(-1.0, device=device, requires_grad=True)
    for reduction in REDUCTIONS:
        liger_kl_div(scalar, torch.tensor(0.5, device=device), reduction=reduction).backward()
    assert scalar.grad == -2


@each_reduction
def test_second_backward_and_no_gradient(reduction, device):
    """C87: upstream 1 and 3 accumulate 4."""
    for dtype in DTYPES:
        x, y = inputs((5, 24), device, dtype)
        leaf = x.clone().requires_grad_()
        loss = liger_kl_div(leaf, y, reduction=reduction)
        upstream = torch.ones_like(loss)
        loss.backward(upstream, retain_graph=True)
        first = leaf.grad.clone()
        loss.backward(3 * upstream)
        torch.testing.assert_close(leaf.grad, 4 * first)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward(upstream)
        assert torch.equal(leaf, x) and not liger_kl_div(x, y).requires_grad
        trained = y.clone().requires_grad_()
        assert torch.autograd.grad(liger_kl_div(leaf, trained), [leaf, trained], allow_unused=True)[1] is None
        with torch.no_grad():
            torch.testing.assert_close(liger_kl_div(leaf, y, reduction=reduction), loss.detach())


def test_no_elements(device):
    """C56: zero, not NaN."""
    for shape in ((0, 64), (4, 0), (3, 0, 25)):
        for reduction in REDUCTIONS:
            loss, grad = run(liger_kl_div, *inputs(shape, device, torch.bfloat16), reduction=reduction)
            assert grad.shape == shape and loss.shape == (shape if reduction == "none" else ()) and not loss.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@either
def test_nan_and_infinity(dtype, log_target, device):
    """Zero probability counts for nothing, also against -inf; NaN stays; a prediction of -inf where there is probability is infinite."""
    x, y = inputs((6, 70), device, dtype, log_target=log_target)
    zero = -INF if log_target else 0.0
    y[0, 3] = y[1, 3] = y[2, 3] = zero
    x[1, 3], x[2, 3], x[3, 3], x[4, 3], y[5, 3] = -INF, NAN, NAN, -INF, NAN
    loss, grad = run(liger_kl_div, x, y, reduction="none", log_target=log_target)
    assert loss[0, 3] == 0 and loss[1, 3] == 0 and loss[[2, 3, 5], 3].isnan().all() and loss[4, 3] == INF
    assert int(loss.isnan().sum()) == 3 and grad[0, 3] == 0 and grad[5, 3].isnan() and int(grad.isnan().sum()) == 1
    rows = [0, 1]
    truth = reference(x[rows].double(), y[rows].double(), "none", log_target)
    torch.testing.assert_close(loss[rows], torch.nan_to_num(truth).float(), rtol=1e-4, atol=1e-6)


def test_results_repeat(device):
    x, y = inputs((999, 1001), device, torch.bfloat16)
    first = run(liger_kl_div, x, y)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(liger_kl_div, x, y), first, strict=True))


def test_module_and_errors(device):
    x, y = inputs((4, 32), device)
    module = LigerKLDIVLoss()
    assert isinstance(module, torch.nn.KLDivLoss) and module.eps == 1e-10 and module.reduction == "mean" and not module.log_target
    assert torch.equal(module(x, y), liger_kl_div(x, y))
    module = LigerKLDIVLoss(1e-3, reduction="batchmean", log_target=True)
    assert torch.equal(module(x, y.log()), liger_kl_div(x, y.log(), reduction="batchmean", log_target=True))
    assert torch.equal(LigerKLDivLossFunction.apply(x, y), liger_kl_div(x, y, reduction="batchmean"))
    assert torch.equal(LigerKLDivLossFunction.apply(x, y, "sum", False, 0.1), liger_kl_div(x, y, False, False, "sum", False, 0.1))
    with pytest.raises(KeyError, match="kl_div: reduction is 'average', expected one of"):
        liger_kl_div(x, y, reduction="average")
    with pytest.raises(ValueError, match=r"kl_div: input is \(4, 32\), target is \(4, 31\); they must be equal"):
        liger_kl_div(x, y[:, :31])
    with pytest.raises(CORE_ERROR, match="kl_div: takes fp32, bf16 and fp16"):
        liger_kl_div(x.double(), y.double())


@either
@each_reduction
def test_opcheck_and_compile(reduction, log_target, device):
    """C63, C66: visible to the compiler; row counts do not recompile."""
    ops = torch.ops.liger_kernel
    x, y = inputs((4, 32), device, log_target=log_target)
    checks, reduce = ("test_schema", "test_faketensor"), reduction != "none"
    torch.library.opcheck(ops.kl_div_forward, (x, y, reduce, 4, log_target, 1e-10, reduce), test_utils=checks)
    torch.library.opcheck(ops.kl_div_backward, (x.mean() if reduce else x, y, x, reduce, 4, log_target), test_utils=checks)

    def model(x, y):
        return liger_kl_div(x * 2, y, reduction=reduction, log_target=log_target) * 3

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        tensors = inputs((rows, 32), device, log_target=log_target)
        for got, want in zip(run(compiled, *tensors), run(model, *tensors), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2


def test_inductor_and_autocast(device):
    for dtype in (torch.float32, torch.float16):
        x, y = inputs((6, 40), device, dtype)

        def model(x, y):
            return liger_kl_div(x * 2, y, reduction="batchmean") * 3

        for got, want in zip(run(torch.compile(model, fullgraph=True), x, y), run(model, x, y), strict=True):
            torch.testing.assert_close(got, want)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            assert torch.equal(liger_kl_div(x, y), liger_kl_div(x, y).float())


def test_every_variant(monkeypatch, device):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    for variant in ("cpu", "cpu_avx2", "cpu_avx512") if device == "cpu" else ("cuda_scalar", "cuda_vector"):
        monkeypatch.setenv("LIGER_KL_DIV", variant)
        for shape in ((5, 64), (3, 4104), (700, 3), (3, 2056), (3, 70)):
            for dtype in DTYPES:
                for log_target in (False, True):
                    for reduction in REDUCTIONS:
                        try:
                            check(*inputs(shape, device, dtype, log_target=log_target), reduction=reduction, log_target=log_target)
                        except CORE_ERROR as e:
                            assert "cannot run" in str(e)
    monkeypatch.setenv("LIGER_KL_DIV", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_kl_div(*inputs((2, 2), "cpu"))


def test_offsets_beyond_32_bits(device):
    """C79 (big): more than 2^31 elements."""
    rows, cols = 524300, 4104
    if device == "cpu" or torch.cuda.mem_get_info(device)[0] < 5 * rows * cols * 2:
        pytest.skip("needs 25 GB of free GPU memory")
    y = torch.rand(rows, cols, device=device, dtype=torch.bfloat16)
    x = -y
    x.requires_grad_()
    liger_kl_div(x, y, reduction="sum").backward()
    for at in (0, 523_263, rows - 1):
        assert torch.equal(x.grad[at], -y[at])
