"""rms_norm_gated against its fp64 definition and against eager PyTorch."""

import functools

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.ops.rms_norm_gated import LigerRMSNormGated, LigerRMSNormGatedFunction, liger_rms_norm_gated
from liger_kernel.ops.rms_norm_gated.cases import DTYPES, GROUPED, SHAPES, bounds
from liger_kernel.ops.rms_norm_gated.ref import eager, reference

KINDS = {
    "norm, silu": dict(),
    "norm, sigmoid, fp32": dict(activation="sigmoid", casting_mode="gemma"),
    "norm, silu, fp32": dict(casting_mode="gemma"),
    "silu, norm": dict(norm_before_gate=False),
    "silu, norm, fp32": dict(norm_before_gate=False, casting_mode="gemma"),
    "sigmoid, norm": dict(norm_before_gate=False, activation="sigmoid"),
}
MANY = 30_000  # the largest fp32 error of fewer elements is chance, and no measure for another's


def run(function, x, gate, w, dy, **options):
    x, gate, w = (None if t is None else t.detach().clone().requires_grad_() for t in (x, gate, w))
    y = function(x, gate, w, **options)
    y.backward(dy)
    return y, x.grad, None if gate is None else gate.grad, None if w is None else w.grad


def check(x, gate, w, dy, eps=1e-6, **options):
    options["eps"] = eps
    ours, eagerly = run(liger_rms_norm_gated, x, gate, w, dy, **options), run(eager, x, gate, w, dy, **options)
    wide = [None if t is None else t.double() for t in (x, gate, w, dy)]
    truth = run(reference, *wide, **options)
    for got, want, bound, theirs, what in zip(ours, truth, bounds(wide[3], *wide[:3], x.dtype, w.dtype, **options), eagerly,
                                              ("y", "dx", "dgate", "dw"), strict=True):
        if want is not None:
            assert_accurate(got, want, bound, None if got.dtype == torch.float32 and got.numel() < MANY else theirs, what)


def operands(shape, dtype, device, scale=1.0, gate_scale=1.0):
    """x, gate, weight, dy"""
    shapes = ((shape, scale), (shape, gate_scale), (shape[-1:], 1.0), (shape, 1.0))
    return [(torch.randn(s, device=device) * by).to(dtype) for s, by in shapes]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    torch.manual_seed(0)
    tensors = operands(shape, dtype, device)
    for options in KINDS.values():
        check(*tensors, **options)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GROUPED, ids=str)
def test_groups(shape, dtype, device):
    torch.manual_seed(1)
    tensors = operands(shape[:2], dtype, device)
    for options in KINDS.values():
        check(*tensors, group_size=shape[2], **options)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales(dtype, device):
    """C49: each family's order of casts, at three magnitudes of x and gates far into both tails."""
    torch.manual_seed(2)
    for scale in (1e-3, 1.0, 100.0):
        for gate_scale in (1e-2, 1.0, 30.0):
            tensors = operands((32, 256), dtype, device, scale, gate_scale)
            for options in KINDS.values():
                check(*tensors, **options)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_as_eager(dtype, device):
    """Rounded where eager code rounds: the results are the same but for rare ties."""
    torch.manual_seed(3)
    x, gate, w, _ = operands((64, 512), dtype, device)
    for weight in (w, w.float()):
        for options in KINDS.values():
            assert (liger_rms_norm_gated(x, gate, weight, **options) != eager(x, gate, weight, **options)).double().mean() < 0.01


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """C53, C60: strided and misaligned inputs and upstream gradients; the gate lies otherwise than x."""
    torch.manual_seed(4)
    for dtype, cols, group in ((torch.bfloat16, 3584, 512), (torch.float32, 132, 33), (torch.float32, 131, None)):
        x, gate, w, dy = operands((6, cols), dtype, device)
        for options in (KINDS["norm, silu"], KINDS["silu, norm"]):
            options = dict(options, group_size=group)
            expected = run(liger_rms_norm_gated, x, gate, w, dy, **options)
            a, b, c = (strided(t, how).detach().requires_grad_() for t, how in ((x, layout), (gate, grad_layout), (w, "offset")))
            y = liger_rms_norm_gated(a, b, c, **options)
            y.backward(strided(dy, grad_layout))
            for got, want in zip((y, a.grad, b.grad, c.grad), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=4 * UNIT_ROUNDOFF[dtype], atol=4 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize("device", devices())
def test_columns_of_a_projection(device):
    """x and gate as columns of one wider matrix [batch, tokens, columns], as Mamba-2 has them: read where they are."""
    torch.manual_seed(5)
    projected = torch.randn(2, 7, 80, device=device, requires_grad=True)
    same = projected.detach().clone().requires_grad_()
    w, dy = torch.randn(32, device=device), torch.randn(2, 7, 32, device=device)
    gate, x, _ = projected.split([32, 32, 16], dim=-1)
    liger_rms_norm_gated(x, gate, w, norm_before_gate=False).backward(dy)
    gate, x, _ = same.split([32, 32, 16], dim=-1)
    eager(x, gate, w, norm_before_gate=False).backward(dy)
    torch.testing.assert_close(projected.grad, same.grad)


@pytest.mark.parametrize("device", devices())
def test_expanded_and_batched(device):
    torch.manual_seed(6)
    row, gate, w = torch.randn(1, 1, 40, device=device), torch.randn(2, 5, 40, device=device), torch.randn(40, device=device)
    leaves = row.clone().requires_grad_(), row.clone().requires_grad_()
    liger_rms_norm_gated(leaves[0].expand(2, 5, 40), gate, w).sum().backward()
    eager(leaves[1].expand(2, 5, 40), gate, w).sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    torch.testing.assert_close(liger_rms_norm_gated(gate[0, 0], gate[0, 1], w), eager(gate[0, 0], gate[0, 1], w))


@pytest.mark.parametrize("device", devices())
def test_without_gate_or_weight(device):
    torch.manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16):
        x, gate, w, dy = operands((9, 96), dtype, device)
        for options in KINDS.values():
            check(x, None, w, dy, **options)
            check(x, None, w, dy, group_size=32, **options)
        same = liger_rms_norm_gated(x, None, w), rms_norm(x, w)
        torch.testing.assert_close(*same, rtol=2 * UNIT_ROUNDOFF[dtype], atol=0)
        for options in (KINDS["norm, silu"], KINDS["silu, norm"]):
            ones = torch.ones(96, device=device, dtype=dtype)
            got, want = run(liger_rms_norm_gated, x, gate, None, dy, **options), run(liger_rms_norm_gated, x, gate, ones, dy, **options)
            for a, b in zip(got[:3], want[:3], strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", devices())
def test_zero_rows(device):
    """C56: empty outputs, a zero weight gradient, nothing launched."""
    for shape in ((3, 0, 2520), (0, 64), (4, 0)):
        for options in (KINDS["norm, silu"], KINDS["silu, norm"]):
            x, gate, w = (torch.ones(s, device=device, dtype=torch.bfloat16, requires_grad=True) for s in (shape, shape, shape[-1:]))
            y = liger_rms_norm_gated(x, gate, w, **options)
            y.sum().backward()
            assert y.shape == x.shape == x.grad.shape == gate.grad.shape
            assert torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("order", ["norm, silu, fp32", "silu, norm, fp32"])
def test_long_weight_gradient(order, device):
    """C62: dW over many rows is summed in fp32, rounded once, and the same from call to call."""
    torch.manual_seed(8)
    x, gate, w, _ = operands((6000, 128), torch.bfloat16, device)
    dy = torch.ones_like(x)
    dw = run(liger_rms_norm_gated, x, gate, w, dy, **KINDS[order])[3]
    truth = run(reference, x.double(), gate.double(), w.double(), dy.double(), **KINDS[order])[3]
    assert ((dw.double() - truth).abs() <= 1.5 * UNIT_ROUNDOFF[torch.bfloat16] * truth.abs() + 1e-2).all()
    assert torch.equal(dw, run(liger_rms_norm_gated, x, gate, w, dy, **KINDS[order])[3])


@pytest.mark.parametrize("device", devices())
def test_gradients_only_where_wanted_and_twice(device):
    """C87: a second backward with another upstream; a frozen input costs nothing and breaks nothing."""
    torch.manual_seed(9)
    for options in (dict(), dict(norm_before_gate=False), dict(norm_before_gate=False, group_size=8)):
        x, gate, w, dy = operands((5, 24), torch.float32, device)
        leaves = [t.clone().requires_grad_() for t in (x, gate, w)]
        y = liger_rms_norm_gated(*leaves, **options)
        y.backward(dy, retain_graph=True)
        first = [t.grad.clone() for t in leaves]
        y.backward(3 * dy)
        for leaf, gradient, value in zip(leaves, first, (x, gate, w), strict=True):
            torch.testing.assert_close(leaf.grad, 4 * gradient)
            assert torch.equal(leaf, value)
        for wanted in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
            inputs = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, gate, w))]
            liger_rms_norm_gated(*inputs, **options).backward(dy)
            for i, t in enumerate(inputs):
                assert (t.grad is not None) == (i in wanted)
                if i in wanted:
                    torch.testing.assert_close(t.grad, first[i])


@pytest.mark.parametrize("device", devices())
def test_mixed_dtypes(device):
    """A gate or a weight of another dtype; the result has x's, gradients have their own tensor's."""
    torch.manual_seed(10)
    wide = torch.randn(4, 96, device=device), torch.randn(4, 96, device=device), torch.randn(96, device=device)
    for options in KINDS.values():
        for dtypes in ((torch.bfloat16, torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16, torch.float32),
                       (torch.bfloat16, torch.bfloat16, torch.float32), (torch.float32, torch.float32, torch.bfloat16),
                       (torch.float16, torch.float16, torch.bfloat16)):
            inputs = [t.to(dtype, copy=True).requires_grad_() for t, dtype in zip(wide, dtypes, strict=True)]
            y = liger_rms_norm_gated(*inputs, **options)
            y.sum().backward()
            assert y.dtype == dtypes[0] and tuple(t.grad.dtype for t in inputs) == dtypes
            truth = reference(*(t.detach().double() for t in inputs), **options)
            torch.testing.assert_close(y.double(), truth, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", devices())
def test_special_values(device):
    """NaN and infinities spoil what they spoil in eager code."""
    torch.manual_seed(11)
    x, gate, w, _ = operands((6, 96), torch.float32, device)
    x[1, 5], x[2, 7], gate[3, 9], gate[4, 2], gate[5, 1] = (float(v) for v in ("nan", "inf", "nan", "-inf", "inf"))
    for options in KINDS.values():
        got, want = liger_rms_norm_gated(x, gate, w, **options), eager(x, gate, w, **options)
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("device", devices())
def test_errors(device):
    x, w = torch.randn(4, 8, device=device), torch.ones(8, device=device)
    before = x.clone()
    for arguments, options, message in (
        ((x, x[:, :7], w), {}, r"gate is \(4, 7\), x \(4, 8\)"), ((x, x, w[:7]), {}, r"weight is \(7,\), x has 8 columns"),
        ((x, x, w), dict(group_size=3), "group_size is 3"), ((x, x, w), dict(activation="relu"), "activation is 'relu'"),
        ((x, x, w), dict(casting_mode="none"), "casting_mode is 'none'"),
    ):
        with pytest.raises(ValueError, match=message):
            liger_rms_norm_gated(*arguments, **options)
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        liger_rms_norm_gated(x.double(), x.double(), w.double())
    with pytest.raises(CORE_ERROR, match="gate is bf16, x is fp32"):
        LigerRMSNormGatedFunction.apply(x, x.bfloat16(), w)
    assert torch.equal(x, before)


@pytest.mark.parametrize("device", devices())
def test_opcheck_and_compile(device):
    """C63, C66: the ops are visible to the compiler; row counts do not recompile."""
    ops = torch.ops.liger_kernel
    x, gate, w, dy = operands((4, 32), torch.float32, device)
    checks = ("test_schema", "test_faketensor")
    for options in ((32, True, 0, 0), (8, False, 1, 1)):
        _, rstd = ops.rms_norm_gated_forward(x, gate, w, 1e-6, *options)
        assert rstd.shape == (4 * 32 // options[0],)
        torch.library.opcheck(ops.rms_norm_gated_forward, (x, gate, w, 1e-6, *options), test_utils=checks)
        for want in ((True, True, True), (False, True, False), (True, False, True)):
            torch.library.opcheck(ops.rms_norm_gated_backward, (dy, x, gate, w, rstd, *options, *want), test_utils=checks)
        torch.library.opcheck(ops.rms_norm_gated_forward, (x, None, None, 1e-6, *options), test_utils=checks)

    def twice(x, gate, w):
        return liger_rms_norm_gated(x, gate, w) * 2 + liger_rms_norm_gated(x, gate.bfloat16(), w, norm_before_gate=False, group_size=16)

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(twice, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        tensors = operands((rows, 32), torch.float32, device)
        for got, want in zip(run(compiled, *tensors), run(twice, *tensors), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    for options in (dict(), dict(norm_before_gate=False, group_size=16)):
        function = functools.partial(liger_rms_norm_gated, **options)
        inductor = torch.compile(function, fullgraph=True)
        for got, want in zip(run(inductor, x, gate, w, dy), run(function, x, gate, w, dy), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", devices())
def test_autocast(device):
    """Autocast changes nothing: norms take what they get."""
    torch.manual_seed(12)
    x, gate, w, _ = operands((4, 32), torch.bfloat16, device)
    module = LigerRMSNormGated(32).to(device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        y = module(x, gate)
    assert y.dtype == torch.bfloat16 and torch.equal(y, module(x, gate))


def test_every_cpu_variant(monkeypatch):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    torch.manual_seed(13)
    tensors = operands((5, 77), torch.bfloat16, "cpu")
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_RMS_NORM_GATED", variant)
        try:
            for options in KINDS.values():
                check(*tensors, **options)
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
    monkeypatch.setenv("LIGER_RMS_NORM_GATED", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_rms_norm_gated(*tensors[:3])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("variants", [("cuda_wide",), ("cuda_registers", "cuda_pipelined")], ids="-".join)
def test_every_cuda_variant(variants, monkeypatch):
    """Both kernels of each pass on shapes that both take: heads of 128, eight groups, one row wider than a block's first choice."""
    torch.manual_seed(14)
    for shape, group in (((300, 128), None), ((33, 8192), 1024), ((5, 16384), None), ((3, 24576), None)):
        tensors = operands(shape, torch.bfloat16, "cuda")
        for options in KINDS.values():
            options = dict(options, group_size=group)
            reference_run = functools.partial(run, liger_rms_norm_gated, *tensors, **options)
            monkeypatch.delenv("LIGER_RMS_NORM_GATED", raising=False)
            want = reference_run()
            for variant in variants:
                monkeypatch.setenv("LIGER_RMS_NORM_GATED", variant)
                for got, other in zip(reference_run(), want, strict=True):
                    torch.testing.assert_close(got, other, rtol=2e-2, atol=2e-2)
