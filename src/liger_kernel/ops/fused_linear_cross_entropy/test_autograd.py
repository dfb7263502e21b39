"""fused_linear_cross_entropy inside autograd, autocast and torch.compile; memory, frozen tensors, errors, signatures."""

import inspect
import sys

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from liger_kernel.core.accuracy import CORE_ERROR, UNIT_ROUNDOFF, devices
from liger_kernel.ops.cross_entropy import CrossEntropyOutput, labels
from liger_kernel.ops.fused_linear_cross_entropy import (
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearCrossEntropyLoss,
    fused_linear_cross_entropy,
    fused_linear_cross_entropy_backward,
    fused_linear_cross_entropy_forward,
    liger_fused_linear_cross_entropy,
)
from liger_kernel.ops.fused_linear_cross_entropy.ref import reference
from liger_kernel.ops.fused_linear_cross_entropy.test_fused_linear_cross_entropy import gradients, make

module = sys.modules[LigerFusedLinearCrossEntropyFunction.__module__]


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def peak_bytes(function, device):
    """Most bytes that `function` holds at once beyond those at its start."""
    if device != "cpu":
        function()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kept = function()
        torch.cuda.synchronize(device)
        del kept
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = function()
    del kept
    now = peak = 0
    for event in sorted((e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_second_backward(dtype, reduction, device):
    """C87: upstream 1, then 3; the sum of both is 4 times the first."""
    torch.manual_seed(0)
    data = make(40, 32, 50, dtype, device)
    for frozen in (None, 0, 1):
        x, weight = leaves(*data[:2])
        if frozen is not None:
            (x, weight)[frozen].requires_grad_(False)
        loss = fused_linear_cross_entropy(x, weight, data[2], reduction=reduction)[0]
        loss.backward(torch.ones_like(loss), retain_graph=True)
        first = [None if t.grad is None else t.grad.clone() for t in (x, weight)]
        loss.backward(torch.full_like(loss, 3))
        for t, g in zip((x, weight), first, strict=True):
            assert (t.grad is None) == (g is None) == (not t.requires_grad)
            if g is not None:
                torch.testing.assert_close(t.grad, 4 * g, rtol=0, atol=32 * UNIT_ROUNDOFF[dtype] * float(g.abs().max()))
        with pytest.raises(RuntimeError, match="second time|modified by an inplace"):
            loss.backward(torch.ones_like(loss))


@pytest.mark.parametrize("device", devices())
def test_each_gradient_only_where_required(device):
    """Departures 13 and 14: input, weight and bias independently."""
    torch.manual_seed(1)
    x, weight, target = make(30, 16, 40, torch.float32, device)
    bias = torch.randn(40, device=device)
    full = gradients(fused_linear_cross_entropy, x, weight, target, bias)[1:]
    for mask in range(8):
        tensors = [t.clone().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate((x, weight, bias))]
        loss = fused_linear_cross_entropy(tensors[0], tensors[1], target, tensors[2])[0]
        assert loss.requires_grad == bool(mask)
        if mask:
            loss.backward()
        for i, (t, want) in enumerate(zip(tensors, full, strict=True)):
            if mask >> i & 1:
                torch.testing.assert_close(t.grad, want)
            else:
                assert t.grad is None


@pytest.mark.parametrize("device", devices())
def test_frozen_head_and_no_gradient(device):
    """C90: without a weight that trains no V x H buffer exists; without a gradient none of H either."""
    rows, hidden, vocab = (512, 1024, 152064) if device != "cpu" else (256, 512, 20000)
    x, weight, target = make(rows, hidden, vocab, torch.bfloat16, device)
    logits = rows * vocab * (2 if device != "cpu" else 4)
    x.requires_grad_()
    assert peak_bytes(lambda: fused_linear_cross_entropy(x, weight, target)[0], device) < logits + vocab * hidden
    weight.requires_grad_()

    def without():
        with torch.no_grad():
            return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]

    assert peak_bytes(without, device) < logits + vocab * hidden


@pytest.mark.parametrize("device", devices())
def test_no_temporary_of_the_weights_size(device):
    """C118: beyond dW (summed in fp32), dx and the logits of a chunk less than 64 MiB; for one chunk dW is its own accumulator."""
    rows, hidden, vocab = (8192, 1024, 32000) if device != "cpu" else (1500, 512, 8000)
    x, weight, target = make(rows, hidden, vocab, torch.bfloat16, device)
    x.requires_grad_(), weight.requires_grad_()
    chunk = 4096 if device != "cpu" else 1024

    def run():
        return fused_linear_cross_entropy(x, weight, target)[0]

    assert peak_bytes(run, device) < 4 * vocab * hidden + 2 * rows * hidden + max(2 * chunk * vocab, 2 * vocab * hidden) + (64 << 20)
    one = x.detach()[: chunk // 4].requires_grad_()
    few = target[: chunk // 4].contiguous()
    least = 2 * vocab * hidden + 2 * chunk // 4 * (vocab + hidden)
    if device != "cpu":
        assert peak_bytes(lambda: fused_linear_cross_entropy(one, weight, few)[0], device) < least + (64 << 20)


@pytest.mark.parametrize("device", devices())
def test_backward_does_not_read_the_weight(device):
    """ZeRO-3 takes the gathered head away after forward."""
    torch.manual_seed(2)
    data = make(40, 32, 50, torch.float32, device)
    expected = gradients(fused_linear_cross_entropy, *data)
    x, weight = leaves(*data[:2])
    loss = fused_linear_cross_entropy(x, weight, data[2])[0]
    with torch.no_grad():
        weight.zero_()
    loss.backward()
    torch.testing.assert_close(x.grad, expected[1])
    torch.testing.assert_close(weight.grad, expected[2])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_and_mixed_dtypes(reduction, amp, head_dtype, x_dtype, bias, device):
    """C91: products in autocast's dtype (else the wider one), gradients in each tensor's own."""
    torch.manual_seed(3)
    x, weight, target = make(60, 48, 70, torch.bfloat16, device)
    x, weight, b = x.to(x_dtype), weight.to(head_dtype), torch.randn(70, device=device).to(head_dtype) if bias else None
    tensors = leaves(x, weight, *([b] if bias else []))
    kind = torch.device(device).type
    with torch.autocast(kind, dtype=amp or torch.bfloat16, enabled=amp is not None):
        loss = fused_linear_cross_entropy(tensors[0], tensors[1], target, tensors[2] if bias else None, reduction=reduction)[0]
    assert loss.dtype == torch.float32
    loss.backward(torch.ones_like(loss))
    truth = gradients(reference, x.double(), weight.double(), target, None if b is None else b.double(), torch.ones_like(loss).double(),
                      reduction=reduction)
    u = UNIT_ROUNDOFF[amp or torch.promote_types(x_dtype, head_dtype)]
    for t, want in zip(tensors, truth[1:], strict=False):
        mine = max(u, UNIT_ROUNDOFF[t.dtype])
        assert t.grad.dtype == t.dtype
        assert (t.grad.double() - want).norm() <= 4 * mine * want.norm(), f"{(t.grad.double() - want).norm() / want.norm() / mine} u"


@pytest.mark.parametrize("device", devices())
def test_low_accumulation(device):
    """accum_dtype: fp32 and None are the same; bf16 is allowed to round per chunk."""
    torch.manual_seed(4)
    x, weight, target = make(3000, 64, 90, torch.bfloat16, device)
    results = [gradients(fused_linear_cross_entropy, x, weight, target, accum_dtype=d, logits_memory=1)[2]
               for d in (None, torch.float32, torch.bfloat16)]
    assert torch.equal(results[0], results[1])
    assert (results[2] - results[0]).norm() <= 4 * UNIT_ROUNDOFF[torch.bfloat16] * results[0].norm()


@pytest.mark.parametrize("device", devices())
def test_labels_out_of_range(device):
    """Departure 17: the assertion of cross entropy, nothing read out of bounds."""
    x, weight, target = make(8, 16, 30, torch.float32, device, ignored=0.0)
    for bad, text in ((30, "out of bounds. Expected < 30"), (-1, "Expected >= 0")):
        target[3] = bad
        with pytest.raises(AssertionError, match=text):
            fused_linear_cross_entropy(x, weight, target)
        with pytest.raises(AssertionError, match=text):
            fused_linear_cross_entropy(x, weight, target, label_stats=labels.ask(target, 30))


@pytest.mark.parametrize("device", devices())
def test_asked_labels(device):
    """The patched models ask for the counts before the model runs."""
    x, weight, target = make(50, 16, 30, torch.float32, device)
    asked = labels.ask(target, 30)
    got = gradients(fused_linear_cross_entropy, x, weight, target, label_stats=asked)
    for a, b in zip(got, gradients(fused_linear_cross_entropy, x, weight, target), strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("device", devices())
def test_errors(device):
    x, weight, target = make(8, 16, 30, torch.float32, device)
    f = liger_fused_linear_cross_entropy
    for flag in ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "use_token_scaling"):
        with pytest.raises(AssertionError, match=flag):
            f(x, weight, target, **{flag: 1})
    with pytest.raises(AssertionError, match="29 elements"):
        f(x, weight, target, ce_weight=torch.ones(29, device=device))
    with pytest.raises(AssertionError, match="floating-point"):
        f(x, weight, target, ce_weight=torch.ones(30, device=device, dtype=torch.int64))
    with pytest.raises(AssertionError, match="16 columns, the weight 15"):
        f(x, weight[:, :15], target)
    with pytest.raises(AssertionError, match="reduction"):
        f(x, weight, target, reduction="batchmean")
    for chunk in (True, 0, 1.5, "2"):
        with pytest.raises(ValueError, match="chunk_mem_const"):
            f(x, weight, target, chunk_mem_const=chunk)
    apply = LigerFusedLinearCrossEntropyFunction.apply
    tail = (None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False)
    with pytest.raises(ValueError, match="ce_impl"):
        apply(x, weight, target, *tail, "fast")
    with pytest.raises(ValueError, match="ce_mode"):
        apply(x, weight, target, *tail, None, "fast")
    with pytest.raises(CORE_ERROR, match="targets|target has 7"):
        f(x, weight, target[:7])
    for options in ({"label_smoothing": 1.5}, {"reduction": "batchmean"}, {"softcap": 0.0}):
        for call in (LigerFusedLinearCrossEntropyLoss, lambda **options: f(x, weight, target, **options)):
            with pytest.raises(AssertionError, match=next(iter(options))):
                call(**options)
    for sum_in in (torch.float64, torch.int32, "float32", 1, True):
        with pytest.raises(ValueError, match="accum_dtype"):
            f(x, weight, target, accum_dtype=sum_in)
    for bad in (target.float() + 0.5, target > 0):
        for call in (f, apply, lambda *a: LigerFusedLinearCrossEntropyLoss()(a[1], a[0], a[2]), fused_linear_cross_entropy_forward):
            with pytest.raises(RuntimeError, match=f"target has dtype {bad.dtype}, expected class indices"):
                call(x, weight, bad)
    assert torch.equal(f(x, weight, target.int()), f(x, weight, target))


@pytest.mark.parametrize("device", devices())
def test_module(device):
    """Weight first; a reversed call says so. With no extra output the loss is a plain tensor."""
    x, weight, target = make(8, 16, 30, torch.float32, device)
    loss = LigerFusedLinearCrossEntropyLoss(label_smoothing=0.1)
    torch.testing.assert_close(loss(weight, x, target), liger_fused_linear_cross_entropy(x, weight, target, label_smoothing=0.1))
    with pytest.raises(ValueError, match="lin_weight, _input, target"):
        loss(x, weight, target)
    out = LigerFusedLinearCrossEntropyLoss(return_z_loss=True, lse_square_scale=1e-3)(weight, x, target)
    assert isinstance(out, CrossEntropyOutput) and out.z_loss > 0 and out.token_accuracy is None
    assert "label_smoothing=0.1" in repr(loss)


@pytest.mark.parametrize("device", devices())
def test_positions_and_helpers(device, monkeypatch):
    """The positional order of apply and of the helpers; the helpers are looked up when they are needed."""
    x, weight, target = make(8, 16, 30, torch.float32, device)
    x.requires_grad_(), weight.requires_grad_()
    bias = torch.randn(30, device=device, requires_grad=True)
    result = LigerFusedLinearCrossEntropyFunction.apply(
        x, weight, target, bias, None, -100, 1e-3, 0.1, "mean", 9.0, True, torch.float32, False, True, True, None, None, 1)
    assert len(result) == 4 and all(t is not None for t in result)
    assert LigerFusedLinearCrossEntropyFunction.supports_inner_impl_dispatch
    helper = fused_linear_cross_entropy_forward(x, weight, target, None, bias, -100, 1e-3, 0.1, "mean", 9.0, True, torch.float32, False,
                                                True, True, None, True, False)
    torch.testing.assert_close(helper[0], result[0])
    assert helper[4] is not None and helper[5] is None and helper[6] is not None
    scaled = fused_linear_cross_entropy_backward(torch.tensor(2.0, device=device), *helper[4:])
    torch.testing.assert_close(scaled[0], 2 * helper[4])
    assert scaled[1] is None
    none = fused_linear_cross_entropy_forward(x, weight, target, reduction="none")
    assert none[0].shape == (8,) and none[4] is none[5] is none[6] is None

    calls = []
    for name in ("fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, name=name, **k: (calls.append(name), real(*a, **k))[1])
    liger_fused_linear_cross_entropy(x, weight, target).backward()
    assert calls == ["fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"]
    assert list(inspect.signature(liger_fused_linear_cross_entropy).parameters)[:5] == ["input", "weight", "target", "bias", "ce_weight"]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_cap_with_and_without_a_gradient(softcap, device):
    """C11: the capped loss is one number in training, in evaluation and compiled."""
    x, weight, target = make(20, 16, 40, torch.float32, device)
    want = F.cross_entropy(softcap * torch.tanh(x @ weight.T / softcap), target)

    def loss(x):
        return liger_fused_linear_cross_entropy(x, weight, target, softcap=softcap)

    for function in (loss, torch.compile(loss, fullgraph=True)):
        with torch.no_grad():
            torch.testing.assert_close(function(x), want)
        torch.testing.assert_close(function(x.clone().requires_grad_()).detach(), want)


@pytest.mark.parametrize("device", devices())
def test_chunk_mem_const(device):
    x, weight, target = make(3000, 16, 300, torch.float32, device)
    for got, want in zip(gradients(fused_linear_cross_entropy, x, weight, target, chunk_mem_const=8),
                         gradients(fused_linear_cross_entropy, x, weight, target, logits_memory=1), strict=True):
        if want is not None:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", devices())
def test_opcheck(device):
    x, weight, target = make(20, 16, 30, torch.bfloat16, device)
    stats = labels.ask(target, 30)
    arguments = (x, weight, target, weight[:, 0].contiguous(), None, stats.device, None, stats.count(), 0, 1, -100, 0.0, 0.0, 0.0, 1.0,
                 True, False, True, True, True, True, True, True)
    for wide in (False, True):
        torch.library.opcheck(torch.ops.liger_kernel.fused_linear_cross_entropy_forward, (*arguments, wide, False),
                              test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile(reduction, device):
    """C119: one graph without breaks; row counts do not recompile; ignored labels and reductions as in eager mode."""
    def loss(x, weight, target):
        out = liger_fused_linear_cross_entropy(x * 2, weight, target, reduction=reduction, return_token_accuracy=True)
        return (out.loss * 3).sum()

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for rows in (5, 9, 12, 33):
        data = make(rows, 16, 40, torch.float32, device)
        for got, want in zip(gradients(lambda x, w, t, b: compiled(x, w, t), *data), gradients(lambda x, w, t, b: loss(x, w, t), *data),
                             strict=True):
            assert got is want is None or torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2
    data = make(20, 16, 40, torch.float32, device)
    inductor = torch.compile(loss, fullgraph=True)
    for got, want in zip(gradients(lambda x, w, t, b: inductor(x, w, t), *data), gradients(lambda x, w, t, b: loss(x, w, t), *data),
                         strict=True):
        assert got is want is None or torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*data), loss(*data))


@pytest.mark.parametrize("device", devices()[1:])
def test_graph_capture(device):
    """Forward and backward in a CUDA graph; no row is left out there, so the numbers of ignored rows may change between replays."""
    x, weight, target = make(300, 64, 515, torch.bfloat16, device)
    x.requires_grad_(), weight.requires_grad_()
    side = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(fused_linear_cross_entropy(x, weight, target)[0], (x, weight))
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        loss = fused_linear_cross_entropy(x, weight, target)[0]
        grads = torch.autograd.grad(loss, (x, weight))
    for _ in range(2):
        target.copy_(make(300, 64, 515, torch.bfloat16, device, ignored=0.6)[2])
        graph.replay()
        want = gradients(lambda a, b, t, c: F.cross_entropy(F.linear(a, b).float(), t), x, weight, target)
        torch.testing.assert_close(loss, want[0].float(), rtol=1e-3, atol=1e-3)
        for got, expected in zip(grads, want[1:3], strict=True):
            assert (got - expected).float().norm() <= 0.02 * expected.float().norm()
