"""The distillation losses inside autograd, autocast and torch.compile; memory, frozen tensors, errors, signatures."""

import inspect

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, UNIT_ROUNDOFF, devices
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.fused_linear_cross_entropy.test_autograd import peak_bytes
from liger_kernel.ops.fused_linear_jsd import (
    LigerFusedLinearJSD,
    LigerFusedLinearJSDFunction,
    distill,
    fused_linear_jsd_backward,
    fused_linear_jsd_forward,
    liger_fused_linear_jsd,
)
from liger_kernel.ops.fused_linear_jsd.ref import reference
from liger_kernel.ops.fused_linear_jsd.test_fused_linear_jsd import gradients, make

on_devices = pytest.mark.parametrize("device", devices())


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_second_backward(dtype, device):
    """C87: upstream 1, then 3; the sum of both is 4 times the first. Each of input and weight frozen."""
    torch.manual_seed(0)
    data = make(40, 32, 24, 50, dtype, device)
    for frozen in (None, 0, 1):
        tensors = [t.clone().requires_grad_(i != frozen) for i, t in enumerate(data[:2])]
        loss = liger_fused_linear_jsd(*tensors, *data[2:])
        loss.backward(torch.ones_like(loss), retain_graph=True)
        first = [None if t.grad is None else t.grad.clone() for t in tensors]
        loss.backward(torch.full_like(loss, 3))
        for t, g in zip(tensors, first, strict=True):
            assert (t.grad is None) == (g is None) == (not t.requires_grad)
            if g is not None:
                torch.testing.assert_close(t.grad, 4 * g, rtol=0, atol=32 * UNIT_ROUNDOFF[dtype] * float(g.abs().max()))
        with pytest.raises(RuntimeError, match="second time|modified by an inplace"):
            loss.backward(torch.ones_like(loss))


@on_devices
def test_each_gradient_only_where_required(device):
    """Departures 13 and 14: input, weight and bias independently; nothing for the teacher, nothing in no_grad."""
    torch.manual_seed(1)
    x, weight, t, other, target = make(30, 16, 16, 40, torch.float32, device)
    bias, teacher_bias = torch.randn(40, device=device), torch.randn(40, device=device)
    full = gradients(distill, x, weight, t, other, target, bias, teacher_bias, hard_weight=0.5)[1:]
    for mask in range(8):
        tensors = [a.clone().requires_grad_(bool(mask >> i & 1)) for i, a in enumerate((x, weight, bias))]
        loss = distill(*tensors[:2], t, other, target, tensors[2], teacher_bias, hard_weight=0.5)[0]
        assert loss.requires_grad == bool(mask)
        if mask:
            loss.backward()
        for i, (a, want) in enumerate(zip(tensors, full, strict=True)):
            if mask >> i & 1:
                torch.testing.assert_close(a.grad, want)
            else:
                assert a.grad is None
    with torch.no_grad():
        assert not distill(*tensors[:2], t, other, target)[0].requires_grad
    teacher = [a.clone().requires_grad_() for a in (t, other, teacher_bias)]
    x.requires_grad_()
    distill(x, weight, *teacher[:2], target, bias, teacher[2])[0].backward()
    assert all(a.grad is None for a in teacher)


@on_devices
def test_frozen_head_and_no_gradient(device):
    """C90: without a weight that trains no V x H buffer exists; without a gradient none of H either."""
    rows, hidden, vocab = (512, 1024, 152064) if device != "cpu" else (192, 512, 20000)
    x, weight, t, other, target = make(rows, hidden, hidden, vocab, torch.bfloat16, device)
    logits = 2 * rows * vocab * (2 if device != "cpu" else 4)
    x.requires_grad_()
    widened = 0 if device != "cpu" else 20 << 20
    assert peak_bytes(lambda: distill(x, weight, t, other, target)[0], device) < logits + vocab * hidden + widened
    weight.requires_grad_()

    def without():
        with torch.no_grad():
            return liger_fused_linear_jsd(x, weight, t, other, target)

    assert peak_bytes(without, device) < logits + vocab * hidden + widened


@on_devices
def test_no_temporary_of_the_weights_size(device):
    """C118: beyond dW (summed in fp32), dx and the logits of a chunk less than 64 MiB."""
    rows, hidden, vocab = (8192, 1024, 32000) if device != "cpu" else (1500, 512, 8000)
    x, weight, t, other, target = make(rows, hidden, hidden, vocab, torch.bfloat16, device, ignored=0.0)
    x.requires_grad_(), weight.requires_grad_()
    logits = (1280 if device != "cpu" else 128) << 20
    got = peak_bytes(lambda: distill(x, weight, t, other, target)[0], device)
    assert got < 4 * vocab * hidden + 2 * rows * hidden + max(logits, 2 * vocab * hidden) + (64 << 20)


@on_devices
def test_backward_does_not_read_the_weight(device):
    """ZeRO-3 takes the gathered head away after forward."""
    torch.manual_seed(2)
    data = make(40, 32, 24, 50, torch.float32, device)
    expected = gradients(liger_fused_linear_jsd, *data)
    x, weight = (a.clone().requires_grad_() for a in data[:2])
    loss = liger_fused_linear_jsd(x, weight, *data[2:])
    with torch.no_grad():
        weight.zero_()
    loss.backward()
    torch.testing.assert_close(x.grad, expected[1])
    torch.testing.assert_close(weight.grad, expected[2])


@on_devices
@pytest.mark.parametrize("hard_weight", [0.0, 0.5])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_mixed_dtypes(amp, head_dtype, x_dtype, hard_weight, device):
    """C38: products in autocast's dtype (else the widest), gradients in each tensor's own."""
    torch.manual_seed(3)
    x, weight, t, other, target = make(60, 48, 32, 70, torch.bfloat16, device, scale=1.0)
    x, weight = x.to(x_dtype), weight.to(head_dtype)
    tensors = [a.clone().requires_grad_() for a in (x, weight)]
    with torch.autocast(torch.device(device).type, dtype=amp or torch.bfloat16, enabled=amp is not None):
        loss = distill(*tensors, t, other, target, hard_weight=hard_weight)[0]
    assert loss.dtype == torch.float32
    loss.backward()
    truth = gradients(reference, *(a.double() for a in (x, weight, t, other)), target, hard_weight=hard_weight)
    u = UNIT_ROUNDOFF[amp or torch.promote_types(x_dtype, head_dtype)]
    for a, want in zip(tensors, truth[1:], strict=False):
        assert a.grad.dtype == a.dtype
        assert (a.grad.double() - want).norm() <= 8 * max(u, UNIT_ROUNDOFF[a.dtype]) * want.norm()


@on_devices
def test_parts(device):
    """Both losses come out unweighted and carry no gradient; the hard one is skipped where nobody asks for it."""
    data = make(40, 16, 16, 30, torch.float32, device)
    x = data[0].requires_grad_()
    loss, soft, hard = distill(x, *data[1:], soft_weight=0.25, hard_weight=2.0, return_parts=True)
    torch.testing.assert_close(loss, 0.25 * soft + 2 * hard)
    assert loss.requires_grad and not soft.requires_grad and not hard.requires_grad
    _, want_soft, want_hard = reference(*(a.double() for a in data[:4]), data[4], hard_weight=2.0)
    torch.testing.assert_close(soft.double(), want_soft, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(hard.double(), want_hard, rtol=1e-5, atol=1e-7)
    loss, soft, hard = distill(*data)
    assert hard is None and torch.equal(loss, soft) and not soft.requires_grad
    loss, soft, hard = distill(*data, return_parts=True)
    torch.testing.assert_close(hard.double(), want_hard, rtol=1e-5, atol=1e-7)


@on_devices
def test_asked_labels(device):
    data = make(50, 16, 16, 30, torch.float32, device)
    got = gradients(distill, *data, hard_weight=0.5, label_stats=labels.ask(data[4], 30))
    for a, b in zip(got, gradients(distill, *data, hard_weight=0.5), strict=True):
        assert a is b is None or torch.equal(a, b)


@on_devices
def test_errors(device):
    x, weight, t, other, target = make(8, 16, 12, 30, torch.float32, device)
    f = liger_fused_linear_jsd
    with pytest.raises(AssertionError, match=r"shift_labels has shape \(7,\), expected \(8,\)"):
        f(x, weight, t, other, target[:7])
    for temperature in (0, -1.0):
        for call in (lambda temperature: f(x, weight, t, other, target, temperature=temperature), LigerFusedLinearJSD):
            with pytest.raises(AssertionError, match="temperature"):
                call(temperature=temperature)
    with pytest.raises(ValueError, match="beta is 1.5"):
        f(x, weight, t, other, target, 1.5)
    with pytest.raises(ValueError, match="teacher has 7 rows, the student 8"):
        f(x, weight, t[:7], other)
    with pytest.raises(ValueError, match="29 entries, the student's 30"):
        f(x, weight, t, other[:29], target)
    with pytest.raises(CORE_ERROR, match="16 columns|equal"):
        f(x, weight[:, :15], t, other, target)
    with pytest.raises(ValueError, match="accum_dtype"):
        f(x, weight, t, other, target, accum_dtype=torch.float64)
    with pytest.raises(ValueError, match="jsd_impl"):
        LigerFusedLinearJSDFunction.apply(x, weight, t, other, target, 0.5, -100, 1.0, None, "fast")
    with pytest.raises(RuntimeError, match="class indices"):
        f(x, weight, t, other, target.float())
    with pytest.raises(ValueError, match="needs labels"):
        distill(x, weight, t, other, hard_weight=1.0)
    target[3] = 30
    assert f(x, weight, t, other, target).isfinite()  # labels only say which rows count
    with pytest.raises(AssertionError, match="out of bounds. Expected < 30"):
        distill(x, weight, t, other, target, hard_weight=1.0)


@on_devices
def test_signatures_and_helpers(device):
    names = ["student_input", "student_weight", "teacher_input", "teacher_weight", "shift_labels", "jsd_beta", "ignore_index",
             "temperature", "accum_dtype"]
    assert list(inspect.signature(liger_fused_linear_jsd).parameters) == names
    x, weight, t, other, target = make(8, 16, 12, 30, torch.float32, device)
    want = gradients(liger_fused_linear_jsd, x, weight, t, other, target, jsd_beta=0.3, temperature=2.0)
    x.requires_grad_(), weight.requires_grad_()
    helper = fused_linear_jsd_forward(x, weight, t, other, target, 0.3, -100, True, 2.0, torch.float32)
    for a, b in zip(helper, want, strict=False):
        torch.testing.assert_close(a, b)
    scaled = fused_linear_jsd_backward(torch.tensor(2.0, device=device), *(a.clone() for a in helper[1:]))
    torch.testing.assert_close(scaled[1], 2 * want[2])
    module = LigerFusedLinearJSD(0.3, -100, 2.0)
    torch.testing.assert_close(module(x, weight, t, other, target).detach(), want[0])
    unlabelled = liger_fused_linear_jsd(x, weight, t, other, jsd_beta=0.3, temperature=2.0)
    torch.testing.assert_close(module(x, weight, t, other, None), unlabelled)
    assert issubclass(LigerFusedLinearJSDFunction, torch.autograd.Function) and "temperature=2.0" in repr(module)


@on_devices
def test_second_derivative_is_refused(device):
    data = make(8, 16, 12, 30, torch.float32, device)
    x = data[0].requires_grad_()
    (g,) = torch.autograd.grad(liger_fused_linear_jsd(x, *data[1:]), x, create_graph=True)
    with pytest.raises(RuntimeError, match="fused_linear_jsd"):
        torch.autograd.grad(g.sum(), x)


@on_devices
def test_opcheck(device):
    x, weight, t, other, target = make(20, 16, 12, 30, torch.bfloat16, device)
    asked = labels.ask(target, 30)
    for wide, hard in ((False, True), (True, False)):
        torch.library.opcheck(
            torch.ops.liger_kernel.fused_linear_jsd_forward,
            (x, weight, weight[:, 0].contiguous(), t, other, None, target, asked.device, asked.count(), 0, 0, -100, 0.5, 2.0, 1e-10, 1.0,
             0.5, hard, True, True, True, wide), test_utils=("test_schema", "test_faketensor"))


@on_devices
@pytest.mark.parametrize("hard_weight", [0.0, 0.5])
def test_compile(hard_weight, device):
    """C119: one graph without breaks; row counts do not recompile; ignored labels as in eager mode."""
    def loss(x, weight, t, other, target):
        return distill(x * 2, weight, t, other, target, hard_weight=hard_weight, temperature=2.0)[0] * 3

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for rows in (5, 9, 12, 33):
        data = make(rows, 16, 12, 40, torch.float32, device)
        for got, want in zip(gradients(compiled, *data), gradients(loss, *data), strict=True):
            assert got is want is None or torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2
    inductor = torch.compile(liger_fused_linear_jsd, fullgraph=True)
    for got, want in zip(gradients(inductor, *data), gradients(liger_fused_linear_jsd, *data), strict=True):
        assert got is want is None or torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*data), loss(*data))


@on_devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compile_low_precision(dtype, device):
    data = make(20, 16, 12, 40, dtype, device)
    compiled = torch.compile(liger_fused_linear_jsd, fullgraph=True)
    for got, want in zip(gradients(compiled, *data), gradients(liger_fused_linear_jsd, *data), strict=True):
        assert got is want is None or torch.allclose(got, want, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("device", devices()[1:])
def test_graph_capture(device):
    """Forward and backward in a CUDA graph; no row is left out there, so the number of ignored rows may change between replays."""
    data = make(300, 64, 32, 515, torch.bfloat16, device)
    x, weight, target = data[0].requires_grad_(), data[1].requires_grad_(), data[4]
    side = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(liger_fused_linear_jsd(*data), (x, weight))
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        loss = liger_fused_linear_jsd(*data)
        grads = torch.autograd.grad(loss, (x, weight))
    for _ in range(2):
        target.copy_(make(300, 64, 32, 515, torch.bfloat16, device, ignored=0.6)[4])
        graph.replay()
        want = gradients(liger_fused_linear_jsd, *data)
        torch.testing.assert_close(loss, want[0], rtol=1e-3, atol=1e-3)
        for got, expected in zip(grads, want[1:3], strict=True):
            assert (got - expected).float().norm() <= 0.02 * expected.float().norm()
