"""group_norm against its fp64 definition and against PyTorch's own op."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, assert_accurate, devices, strided
from liger_kernel.ops.group_norm import LigerGroupNorm, LigerGroupNormFunction, group_norm_backward, group_norm_forward, liger_group_norm
from liger_kernel.ops.group_norm.cases import DTYPES, SHAPES, bounds, check, inputs, ours, run
from liger_kernel.ops.group_norm.ref import eager, reference

pytestmark = pytest.mark.parametrize("device", devices())
MANY = 5000  # the largest error of fewer elements is chance, and no measure for another's


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, groups", SHAPES, ids=str)
def test_shapes(shape, groups, dtype, device):
    """C59: any number of spatial dimensions."""
    check(*inputs(shape, device, dtype), groups, compare_eager=torch.Size(shape).numel() > MANY)


@pytest.mark.parametrize("parameter_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_scales_offsets_and_eps(dtype, parameter_dtype, device):
    for scale, offset, eps in ((1e-2, 0, 1e-6), (1.0, 0, 1e-3), (30.0, 0, 1e-6), (1.0, 1000.0, 1e-6)):
        results = check(*inputs((3, 6, 20), device, dtype, parameter_dtype, scale, offset), 2, compare_eager=False, eps=eps)
        assert [t.dtype for t in results] == [dtype, dtype, parameter_dtype, parameter_dtype]


def test_an_outlier_first(device):
    """The variance does not depend on which element comes first."""
    x, weight, bias, dy = inputs((2, 4, 64, 64), device)
    x[:, :, 0, 0] = 1e4
    check(x, weight, bias, dy, 2, compare_eager=False)  # its largest errors are those of eight elements


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients."""
    for dtype, shape in ((torch.bfloat16, (2, 8, 6, 16)), (torch.float32, (2, 6, 13))):
        x, weight, bias, dy = inputs(shape, device, dtype)
        check(strided(x, layout), weight, bias, strided(dy, grad_layout), 2, compare_eager=False)


def test_channels_last_and_strided_parameters(device):
    x, weight, bias, dy = inputs((2, 8, 6, 5), device)
    want = run(ours, x, weight, bias, dy, 4)
    last = x.contiguous(memory_format=torch.channels_last), dy.contiguous(memory_format=torch.channels_last)
    spaced = torch.stack([weight, bias], 1)
    got = run(ours, last[0], spaced[:, 0], spaced[:, 1], last[1], 4)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    plane = x[:1, :1].clone().requires_grad_()
    liger_group_norm(plane.expand(2, 8, 6, 5), weight, bias, 8, 4, 1e-6).backward(dy)
    expected = x[:1, :1].clone().requires_grad_()
    eager(expected.expand(2, 8, 6, 5), weight, bias, 4).backward(dy)
    torch.testing.assert_close(plane.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_gradients_only_where_wanted_and_twice(device):
    x, weight, bias, dy = inputs((3, 6, 20), device)
    want = run(ours, x, weight, bias, dy, 3)[1:]
    for i in range(3):
        leaves = [t.detach().clone() for t in (x, weight, bias)]
        leaves[i].requires_grad_()
        ours(*leaves, 3).backward(dy)
        assert torch.equal(leaves[i].grad, want[i])
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = ours(*leaves, 3)
    y.backward(dy, retain_graph=True)
    y.backward(2 * dy)
    for leaf, g in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, 3 * g)
    assert torch.equal(leaves[0], x)


def test_results_repeat(device):
    """No order of additions is left to chance: gradients repeat bit for bit."""
    tensors = inputs((40, 16, 24, 24), device, torch.bfloat16)
    first = run(ours, *tensors, 4)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(ours, *tensors, 4), first, strict=True))


def test_parameter_gradients_in_half_precision(device):
    """C62: an upstream gradient of mean 1: summed in fp32 and rounded once, at the end."""
    x, weight, bias, dy = inputs((64, 8, 16, 16), device, torch.bfloat16)
    check(x, weight, bias, dy + 1, 4)


def test_no_elements(device):
    for shape in ((0, 6, 20), (3, 6, 0), (3, 6, 4, 0)):
        x, weight, bias, dy = inputs(shape, device, torch.bfloat16)
        y, dx, dw, db = run(ours, x, weight, bias, dy, 3)
        assert y.shape == dx.shape == shape and not dw.any() and not db.any()


def test_nan_and_infinity(device):
    """They spoil their own group, and no other."""
    x, weight, bias, dy = inputs((2, 6, 40), device)
    x[0, 0, 3], x[1, 4, 5] = float("nan"), float("inf")
    results, plain = run(ours, x, weight, bias, dy, 3), run(eager, x, weight, bias, dy, 3)
    for got, want in zip(results[:2], plain[:2], strict=True):
        assert torch.equal(got.isnan(), want.isnan())


def test_module_helpers_and_errors(device):
    x, weight, bias, dy = inputs((2, 6, 4, 5), device)
    module = LigerGroupNorm(6, 3, eps=1e-5).to(device)
    assert "num_channels=6, num_groups=3, eps=1e-05" in repr(module)
    assert module.variance_epsilon == module.eps == 1e-5 and not module.bias.any() and LigerGroupNorm(6, 3, bias=True).bias.any()
    torch.testing.assert_close(module(x), torch.nn.GroupNorm(3, 6, eps=1e-5, device=device)(x))
    assert not LigerGroupNorm(6, 2, init_fn="zeros").weight.any()
    want = run(ours, x, weight, bias, dy, 3)
    assert torch.equal(LigerGroupNormFunction.apply(x, weight, bias, 6, 3, 1e-6), want[0])
    y, saved, mean, rstd = group_norm_forward(x, 6, 3, weight, bias, 1e-6)
    for a, b in zip((y, *group_norm_backward(dy, saved, weight, bias, mean, rstd, 6, 3)), want, strict=True):
        assert torch.equal(a, b)
    for arguments, match in (((6, 4), "do not divide"), ((6, 3, 1e-6, False, "twos"), "init_fn is 'twos'")):
        with pytest.raises(AssertionError, match=match):
            LigerGroupNorm(*arguments)
    with pytest.raises(AssertionError, match="2 dimensions"):
        module(x[..., 0, 0])
    with pytest.raises(AssertionError, match="x has 5 channels, num_channels is 6"):
        module(x[:, :5])
    with pytest.raises(CORE_ERROR, match="weight has 5 elements in 1 dimensions, x has 6 channels"):
        liger_group_norm(x, weight[:5], bias, 6, 3, 1e-6)
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        liger_group_norm(x.double(), weight, bias, 6, 3, 1e-6)


def test_opcheck_compile_and_autocast(device):
    """C63, C66: visible to the compiler; batch sizes do not recompile."""
    ops = torch.ops.liger_kernel
    x, weight, bias, dy = inputs((2, 6, 4, 5), device)
    _, mean, rstd = ops.group_norm_forward(x, weight, bias, 3, 1e-6)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.group_norm_forward, (x, weight, bias, 3, 1e-6), test_utils=checks)
    for wanted in ((True, True, True), (False, True, False)):
        torch.library.opcheck(ops.group_norm_backward, (dy, x, weight, bias, mean, rstd, 3, *wanted), test_utils=checks)

    def model(x, weight, bias, groups, eps):
        return ours(x * 2, weight, bias, groups, eps) + x

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch in (3, 5, 6, 9, 17):
        tensors = inputs((batch, 6, 8), device)
        for got, want in zip(run(compiled, *tensors, 3), run(model, *tensors, 3), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    tensors = x, weight, bias, dy
    for got, want in zip(run(torch.compile(model, fullgraph=True), *tensors, 3), run(model, *tensors, 3), strict=True):
        torch.testing.assert_close(got, want)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert ours(x, weight, bias, 3).dtype == torch.float32


def test_every_variant(monkeypatch, device):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    for variant in ("cpu", "cpu_avx2", "cpu_avx512") if device == "cpu" else ("cuda_scalar", "cuda_vector"):
        monkeypatch.setenv("LIGER_GROUP_NORM", variant)
        for shape, groups in SHAPES:
            for dtype in DTYPES:
                try:
                    check(*inputs(shape, device, dtype), groups, compare_eager=False)
                except CORE_ERROR as e:
                    assert "cannot run" in str(e)
    monkeypatch.setenv("LIGER_GROUP_NORM", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        ours(*inputs((2, 2, 2), "cpu")[:3], 1)


def test_offsets_beyond_32_bits(device):
    """C79 (big): more than 2^31 elements; first, middle and last samples."""
    shape = (131, 16, 1024, 1024)
    elements = torch.Size(shape).numel()
    if device == "cpu" or torch.cuda.mem_get_info(device)[0] < 5 * elements * 2:
        pytest.skip("needs 25 GB of free GPU memory")
    _, weight, bias, _ = inputs((1, 16, 1), device)
    x = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_().requires_grad_()
    y = ours(x, weight, bias, 4)
    y.backward(y.detach())
    picked = [0, 127, 128, 130]
    small = x.detach()[picked].double(), weight.double(), bias.double(), y.detach()[picked].double()
    truth, allowed = run(reference, *small, 4), bounds(*small, 4)
    assert_accurate(y[picked], truth[0], allowed[0])
    assert_accurate(x.grad[picked], truth[1], allowed[1])
