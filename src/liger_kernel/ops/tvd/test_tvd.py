"""tvd against its fp64 definition and against eager code."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, devices, strided
from liger_kernel.ops.tvd import LigerTVDLoss, LigerTVDLossFunction, liger_tvd
from liger_kernel.ops.tvd.cases import DTYPES, REDUCTIONS, SHAPES, check, inputs, labels_for, run

pytestmark = pytest.mark.parametrize("device", devices())
INF, NAN = float("inf"), float("nan")
each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
with_labels = pytest.mark.parametrize("labelled", [False, True], ids=["all", "labels"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@with_labels
@each_reduction
def test_shapes(shape, dtype, labelled, reduction, device):
    check(*inputs(shape, device, dtype), labels_for(shape[0], device) if labelled else None, reduction=reduction)


@with_labels
@each_reduction
def test_no_worse_than_eager(labelled, reduction, device):
    for dtype in DTYPES:
        check(*inputs((300, 1000), device, dtype), labels_for(300, device) if labelled else None, True, reduction=reduction)


@each_reduction
def test_dtypes_may_differ(reduction, device):
    for dtype in DTYPES:
        for other in DTYPES:
            check(*inputs((9, 70), device, dtype, other), labels_for(9, device), reduction=reduction)


@with_labels
@each_reduction
def test_upstream_gradients(labelled, reduction, device):
    """C19: of other size than one; fp16's survives 1 / elements when a loss scale comes from above."""
    for dtype in DTYPES:
        for upstream in (-2.5, 65536.0, 0.0):
            check(*inputs((40, 1000), device, dtype), labels_for(40, device) if labelled else None,
                  upstream=upstream if dtype != torch.float16 or reduction == "mean" else 3.0, reduction=reduction)
    p, q = inputs((64, 4096), device, torch.float16)
    grad = run(liger_tvd, p, q, None, 65536.0, reduction="mean")[1]
    torch.testing.assert_close(grad.float(), (p.float() - q.float()).sign() * (32768 / p.numel()), rtol=1e-3, atol=0)


@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, target_layout, device):
    """C22: strided and misaligned operands, labels, and upstream gradients of the elements."""
    for dtype, cols in ((torch.bfloat16, 3584), (torch.float32, 131), (torch.bfloat16, 5001)):
        p, q = inputs((6, cols), device, dtype)
        labels = labels_for(6, device)
        for reduction in ("none", "batchmean"):
            check(strided(p, layout), strided(q, target_layout), reduction=reduction)
            check(strided(p, layout), strided(q, target_layout), torch.stack([labels, labels], 1)[:, 0], reduction=reduction)
        leaf = p.clone().requires_grad_()
        dy = torch.randn(6, cols, device=device)
        liger_tvd(leaf, q, reduction="none").backward(strided(dy, layout))
        torch.testing.assert_close(leaf.grad, ((p.float() - q.float()).sign() / 2 * dy).to(dtype))


def test_leading_dimensions_and_expanded_operands(device):
    p, q = inputs((2, 3, 5, 40), device)
    for reduction in REDUCTIONS:
        check(p, q, labels_for(30, device), reduction=reduction)
        check(p.transpose(1, 3), q.transpose(1, 3), reduction=reduction)
        check(p[0, 0, 0], q[0, 0, 0], reduction=reduction)
    row = p[0, 0, :1].clone().requires_grad_()
    liger_tvd(row.expand(5, 40), q[0, 0], reduction="sum").backward()
    torch.testing.assert_close(row.grad, (p[0, 0, :1] - q[0, 0]).sign().sum(0, keepdim=True) / 2)


@pytest.mark.parametrize("ignore_index", [-100, 0, 7])
@each_reduction
def test_ignored_rows(reduction, ignore_index, device):
    """They give 0 and no gradient whatever they hold; none left: 0, not NaN (C5)."""
    for dtype in DTYPES:
        p, q = inputs((12, 50), device, dtype)
        labels = labels_for(12, device, ignore_index)
        left_out = labels == ignore_index
        clean = check(p, q, labels, reduction=reduction, ignore_index=ignore_index)
        p[left_out], q[left_out] = NAN, INF
        dirty = run(liger_tvd, p, q, labels, reduction=reduction, ignore_index=ignore_index)
        assert all(torch.equal(a, b) for a, b in zip(dirty, clean, strict=True)) and not dirty[1][left_out].any()
        for nothing in run(liger_tvd, p, q, torch.full_like(labels, ignore_index), reduction=reduction, ignore_index=ignore_index):
            assert not nothing.any() and not nothing.isnan().any()
    check(p[~left_out], q[~left_out], labels[~left_out].int(), reduction=reduction, ignore_index=ignore_index)


def test_ties(device):
    """No gradient where p = q."""
    p = torch.softmax(torch.randn(4, 30, device=device), -1)
    assert not run(liger_tvd, p, p.clone(), reduction="sum")[1].any()


@each_reduction
def test_second_backward_and_no_gradient(reduction, device):
    """C87: upstream 1 and 3 accumulate 4."""
    for dtype in DTYPES:
        p, q = inputs((5, 24), device, dtype)
        leaf = p.clone().requires_grad_()
        loss = liger_tvd(leaf, q, reduction=reduction)
        upstream = torch.ones_like(loss)
        loss.backward(upstream, retain_graph=True)
        first = leaf.grad.clone()
        loss.backward(3 * upstream)
        torch.testing.assert_close(leaf.grad, 4 * first)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward(upstream)
        assert torch.equal(leaf, p) and not liger_tvd(p, q).requires_grad
        trained = q.clone().requires_grad_()
        assert torch.autograd.grad(liger_tvd(leaf, trained), [leaf, trained], allow_unused=True)[1] is None
        with torch.no_grad():
            torch.testing.assert_close(liger_tvd(leaf, q, reduction=reduction), loss.detach())


def test_no_elements(device):
    """C56: zero, not NaN."""
    for shape in ((0, 64), (4, 0), (3, 0, 25)):
        for labels in (None, labels_for(torch.Size(shape[:-1]).numel(), device)):
            for reduction in REDUCTIONS:
                loss, grad = run(liger_tvd, *inputs(shape, device, torch.bfloat16), labels, reduction=reduction)
                assert grad.shape == shape and loss.shape == (shape if reduction == "none" else ()) and not loss.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(dtype, device):
    p, q = inputs((3, 70), device, dtype)
    p[0, 3], q[1, 4], p[2, 5] = NAN, NAN, INF
    loss, _ = run(liger_tvd, p, q, reduction="none")
    assert loss[0, 3].isnan() and loss[1, 4].isnan() and loss[2, 5] == INF and int(loss.isnan().sum()) == 2


def test_results_repeat(device):
    p, q = inputs((999, 1001), device, torch.bfloat16)
    first = run(liger_tvd, p, q)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(liger_tvd, p, q), first, strict=True))


def test_module_and_errors(device):
    p, q = inputs((4, 32), device)
    labels = labels_for(4, device)
    module = LigerTVDLoss()
    assert module.reduction == "batchmean" and module.ignore_index == -100
    assert torch.equal(module(p, q), liger_tvd(p, q, reduction="batchmean")) and torch.equal(LigerTVDLossFunction.apply(p, q), module(p, q))
    assert torch.equal(LigerTVDLoss("sum", 4)(p, q, labels), liger_tvd(p, q, labels, "sum", 4))
    with pytest.raises(KeyError, match="tvd: reduction is 'average', expected one of"):
        liger_tvd(p, q, reduction="average")
    with pytest.raises(ValueError, match=r"tvd: input is \(4, 32\), target is \(4, 31\); they must be equal"):
        liger_tvd(p, q[:, :31])
    for wrong in (labels[:3], labels.view(2, 2)):
        with pytest.raises(AssertionError, match=r"expected \(4,\)"):
            liger_tvd(p, q, wrong)
    with pytest.raises(RuntimeError, match="tvd: target has dtype torch.float32"):
        liger_tvd(p, q, labels.float())
    with pytest.raises(CORE_ERROR, match="tvd: takes fp32, bf16 and fp16"):
        liger_tvd(p.double(), q.double())


@with_labels
@each_reduction
def test_opcheck_and_compile(reduction, labelled, device):
    """C63, C66: visible to the compiler; row counts do not recompile."""
    ops = torch.ops.liger_kernel
    p, q = inputs((4, 32), device)
    labels = labels_for(4, device) if labelled else None
    scale = torch.ones(1, device=device) if labelled else None
    checks, reduce = ("test_schema", "test_faketensor"), reduction != "none"
    torch.library.opcheck(ops.tvd_forward, (p, q, labels, scale, reduce, 4, -100, reduce), test_utils=checks)
    torch.library.opcheck(ops.tvd_backward, (p.mean() if reduce else p, p, q, labels, scale, reduce, 4, -100), test_utils=checks)

    def model(p, q, labels):
        return liger_tvd(p * 2, q, labels, reduction=reduction) * 3

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        tensors = *inputs((rows, 32), device), labels_for(rows, device) if labelled else None
        for got, want in zip(run(compiled, *tensors), run(model, *tensors), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2


def test_inductor_and_autocast(device):
    for dtype in (torch.float32, torch.float16):
        p, q = inputs((6, 40), device, dtype)

        def model(p, q, labels):
            return liger_tvd(p * 2, q, labels, reduction="batchmean") * 3

        tensors = p, q, labels_for(6, device)
        for got, want in zip(run(torch.compile(model, fullgraph=True), *tensors), run(model, *tensors), strict=True):
            torch.testing.assert_close(got, want)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            assert liger_tvd(p, q).dtype == torch.float32


def test_every_variant(monkeypatch, device):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    for variant in ("cpu", "cpu_avx2", "cpu_avx512") if device == "cpu" else ("cuda_scalar", "cuda_vector"):
        monkeypatch.setenv("LIGER_TVD", variant)
        for shape in ((5, 64), (3, 4104), (700, 3), (3, 2056), (3, 70)):
            for dtype in DTYPES:
                for labels in (None, labels_for(shape[0], device)):
                    for reduction in REDUCTIONS:
                        try:
                            check(*inputs(shape, device, dtype), labels, reduction=reduction)
                        except CORE_ERROR as e:
                            assert "cannot run" in str(e)
    monkeypatch.setenv("LIGER_TVD", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_tvd(*inputs((2, 2), "cpu"))


def test_offsets_beyond_32_bits(device):
    """C79 (big): more than 2^31 elements, with and without labels."""
    rows, cols = 524300, 4104
    if device == "cpu" or torch.cuda.mem_get_info(device)[0] < 6 * rows * cols * 2:
        pytest.skip("needs 30 GB of free GPU memory")
    q = torch.rand(rows, cols, device=device, dtype=torch.bfloat16)
    p = (1 - q).requires_grad_()
    for labels in (None, torch.ones(rows, device=device, dtype=torch.int64)):
        p.grad = None
        liger_tvd(p, q, labels, reduction="sum").backward()
        for at in (0, 523_263, rows - 1):
            assert torch.equal(p.grad[at], (p.detach()[at] - q[at]).sign() / 2)
