"""fused_linear_log_probs inside autograd, autocast and torch.compile; memory, frozen tensors, errors; losses made in one pass."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from liger_kernel.core.accuracy import CORE_ERROR, UNIT_ROUNDOFF, devices
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.fused_linear_log_probs import ChunkLoss, fused_linear_log_probs, log_probs_and_gradients
from liger_kernel.ops.fused_linear_log_probs.ref import reference
from liger_kernel.ops.fused_linear_log_probs.test_fused_linear_log_probs import make, one_pass, ours, random_upstream, truth


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_second_backward(dtype, device):
    """C87: upstream 1, then 3; the sum of both is 4 times the first. The caller may change a result in between."""
    torch.manual_seed(0)
    data = make(40, 32, 50, dtype, device)
    for frozen in (None, 0, 1):
        x, weight = leaves(*data[:2])
        if frozen is not None:
            (x, weight)[frozen].requires_grad_(False)
        out = fused_linear_log_probs(x, weight, data[2], return_entropy=True)
        both = (out.logp, out.entropy)
        torch.autograd.backward(both, [torch.ones_like(t) for t in both], retain_graph=True)
        first = [None if t.grad is None else t.grad.clone() for t in (x, weight)]
        for t in both:
            t.detach().zero_()
        torch.autograd.backward(both, [torch.full_like(t, 3) for t in both])
        for t, g in zip((x, weight), first, strict=True):
            assert (t.grad is None) == (g is None) == (not t.requires_grad)
            if g is not None:
                torch.testing.assert_close(t.grad, 4 * g, rtol=0, atol=32 * UNIT_ROUNDOFF[dtype] * float(g.abs().max()))
        with pytest.raises(RuntimeError, match="second time"):
            both[0].sum().backward()


@pytest.mark.parametrize("device", devices())
def test_second_derivative_is_refused(device):
    x, weight, target = make(8, 16, 30, torch.float32, device)
    x, weight = leaves(x, weight)
    (dx,) = torch.autograd.grad(fused_linear_log_probs(x, weight, target).logp.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="fused_linear_log_probs"):
        dx.sum().backward()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("function", [ours, one_pass])
def test_each_gradient_only_where_required(function, device):
    """Departures 13 and 14: input, weight and bias independently."""
    torch.manual_seed(1)
    x, weight, target = make(30, 16, 40, torch.float32, device)
    bias, upstream = torch.randn(40, device=device), random_upstream(30, device)
    full = function(x, weight, target, bias, upstream)[1]
    for mask in range(8):
        tensors = [t.clone().requires_grad_(bool(mask >> i & 1)) for i, t in enumerate((x, weight, bias))]
        if function is ours:
            out = fused_linear_log_probs(tensors[0], tensors[1], target, tensors[2], return_entropy=True, return_lse=True)
            results = (out.logp, out.entropy, out.lse)
            assert all(r.requires_grad == bool(mask) for r in results)
            if mask:
                torch.autograd.backward(results, upstream)
            grads = [t.grad for t in tensors]
        else:
            _, *grads = log_probs_and_gradients(tensors[0], tensors[1], target, lambda b, e, c: tuple(g[b:e] for g in upstream), tensors[2],
                                                want_entropy=True)
        for i, (got, want) in enumerate(zip(grads, full, strict=True)):
            if mask >> i & 1:
                torch.testing.assert_close(got, want)
            else:
                assert got is None


@pytest.mark.parametrize("device", devices())
def test_memory(device):
    """C90, C118: forward holds one tile; with a frozen head no V x H buffer exists; dW needs none besides itself."""
    rows, hidden, vocab = (4096, 1024, 128000) if device != "cpu" else (512, 256, 60000)
    x, weight, target = make(rows, hidden, vocab, torch.float32, device)
    tile, slack = (256 << 20) if device != "cpu" else (32 << 20), 40 << 20
    assert peak_bytes(lambda: fused_linear_log_probs(x, weight, target, return_entropy=True), device) < tile + slack < rows * vocab * 4
    x.requires_grad_()

    def both():
        out = fused_linear_log_probs(x, weight, target)
        return torch.autograd.grad(out.logp.sum(), [t for t in (x, weight) if t.requires_grad])

    frozen = peak_bytes(both, device)
    assert frozen < tile + slack + 8 * rows * hidden
    weight.requires_grad_()
    assert peak_bytes(both, device) < frozen + 4 * vocab * hidden + slack


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [ours, one_pass])
def test_autocast_and_mixed_dtypes(function, amp, head_dtype, x_dtype, bias, device):
    """C91: products in autocast's dtype (else the wider one), gradients in each tensor's own."""
    torch.manual_seed(2)
    x, weight, target = make(200, 48, 70, torch.bfloat16, device)
    x, weight, b = x.to(x_dtype), weight.to(head_dtype), torch.randn(70, device=device).to(head_dtype) if bias else None
    upstream = random_upstream(200, device)
    with torch.autocast(torch.device(device).type, dtype=amp or torch.bfloat16, enabled=amp is not None):
        _, grads = function(x, weight, target, b, upstream, logits_memory=1)
    _, true = truth(x, weight, target, b, upstream)
    u = UNIT_ROUNDOFF[amp or torch.promote_types(x_dtype, head_dtype)]
    for t, got, want in zip((x, weight, b), grads, true, strict=True):
        if t is not None:
            assert got.dtype == t.dtype
            assert (got.double() - want).norm() <= 6 * max(u, UNIT_ROUNDOFF[t.dtype]) * want.norm()


@pytest.mark.parametrize("device", devices())
def test_labels_out_of_range(device):
    """The assertion of cross entropy, nothing read out of bounds."""
    x, weight, target = make(8, 16, 30, torch.float32, device, ignored=0.0)
    for bad, text in ((30, "out of bounds. Expected < 30"), (-1, "Expected >= 0")):
        target[3] = bad
        with pytest.raises(AssertionError, match=text):
            fused_linear_log_probs(x, weight, target)
        with pytest.raises(AssertionError, match=text):
            fused_linear_log_probs(x, weight, target, label_stats=labels.ask(target, 30))
        with pytest.raises(AssertionError, match=text):
            log_probs_and_gradients(x, weight, target, lambda *a: None)
        results = torch.ops.liger_kernel.fused_linear_log_probs_forward(x, weight, target, None, -100, 0.0, 1.0, 1.0, 0, True, True)
        assert bool(results[0].isnan()[3]) and int(results[0].isnan().sum()) == 1 and int(results[4][3]) == -1


@pytest.mark.parametrize("device", devices())
def test_errors(device):
    x, weight, target = make(8, 16, 30, torch.float32, device, ignored=0.0)
    f = fused_linear_log_probs
    for arguments, text in (((x, weight[:, :15], target), r"\(30, 15\)"), ((x, weight, target[:7]), r"target is \(7,\)"),
                            ((x, weight, target, weight[:29, 0]), r"bias is \(29,\)")):
        with pytest.raises(ValueError, match=text):
            f(*arguments)
    for name, value in (("temperature", 0.0), ("temperature", float("nan")), ("softcap", -1.0), ("softcap", 0.0),
                        ("logit_scale", float("inf"))):
        with pytest.raises(ValueError, match=name):
            f(x, weight, target, **{name: value})
    with pytest.raises(RuntimeError, match="class indices"):
        f(x, weight, target.float())
    with pytest.raises(ValueError, match="8 rows are not whole groups of 3"):
        log_probs_and_gradients(x, weight, target, lambda *a: None, group=3)
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        f(x.double(), weight.double(), target)
    scratch = torch.empty(10, device=device)
    with pytest.raises(CORE_ERROR, match="memory has 40 bytes"):
        torch.ops.liger_kernel.fused_linear_log_probs_chunk_forward_(scratch, x, weight, target, None, -100, 0.0, 1.0, 1.0, False, False)
    assert f(x, weight, target.int()).logp.shape == (8,)


def policy_loss(logp, entropy, old, advantage, mask):
    """Ratio clipping with an entropy bonus: the coefficient depends on the log-probability itself."""
    ratio = torch.exp(logp - old)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.01 * entropy
    return (loss * mask).sum()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_token_level_policy_loss(dtype, device):
    torch.manual_seed(3)
    x, weight, target = make(500, 32, 1001, dtype, device, ignored=0.6)
    x, weight = leaves(x, weight)
    old, advantage, mask = -torch.rand(500, device=device) * 8, torch.randn(500, device=device), (target != -100).float() / 500
    loss = ChunkLoss(lambda b, e, c: policy_loss(c.logp, c.entropy, old[b:e], advantage[b:e], mask[b:e]))
    _, dx, dw, _ = log_probs_and_gradients(x, weight, target, loss, want_entropy=True, logits_memory=1)
    x64, weight64 = leaves(x.double(), weight.double())
    logp, entropy, _ = reference(x64, weight64, target)
    true = policy_loss(logp, entropy, old, advantage, mask)
    true.backward()
    true = true.detach()
    u = UNIT_ROUNDOFF[dtype]
    assert abs(float(loss.loss) - float(true)) <= 40 * u * abs(float(true)) + 1e-5
    assert (dx.double() - x64.grad).norm() <= 60 * u * x64.grad.norm()
    assert (dw.double() - weight64.grad).norm() <= 60 * u * weight64.grad.norm()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_sequence_level_loss(ignored, device):
    """Chunks are whole groups: pairs of sequences, whose loss is of the difference of their sums."""
    torch.manual_seed(4)
    pairs, length = 6, 50
    x, weight, target = make(pairs * 2 * length, 24, 301, torch.float32, device, ignored)
    target[: 2 * length] = -100 if ignored else target[: 2 * length]  # a pair without a token

    def loss_of(logp):
        chosen, rejected = logp.view(-1, 2, length).sum(-1).unbind(1)
        return -F.logsigmoid(0.1 * (chosen - rejected)).sum()

    loss = ChunkLoss(lambda b, e, c: loss_of(c.logp))
    results, dx, dw, _ = log_probs_and_gradients(x, weight, target, loss, group=2 * length, want_dx=True, want_dw=True, logits_memory=1)
    x64, weight64 = leaves(x.double(), weight.double())
    logp = reference(x64, weight64, target)[0]
    loss_of(logp).backward()
    torch.testing.assert_close(results.logp.double(), logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.loss.double(), loss_of(logp), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.double(), x64.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dw.double(), weight64.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", devices())
def test_opcheck(device):
    x, weight, target = make(20, 16, 30, torch.bfloat16, device)
    bias, ops = weight[:, 0].contiguous(), torch.ops.liger_kernel
    tests = ("test_schema", "test_faketensor")
    options = (-100, 5.0, 0.5, 2.0)
    for wanted in (True, False):
        torch.library.opcheck(ops.fused_linear_log_probs_forward, (x, weight, target, bias, *options, 0, wanted, wanted), test_utils=tests)
    results = ops.fused_linear_log_probs_forward(x, weight, target, bias, *options, 0, True, True)
    upstream = random_upstream(20, device)
    for wide in (False, True):
        torch.library.opcheck(ops.fused_linear_log_probs_backward,
                              (x, weight, target, bias, *results[:4], *upstream, *options, 0, True, True, wide, wide), test_utils=tests)
    scratch = torch.empty(20 * 32, device=device)
    torch.library.opcheck(ops.fused_linear_log_probs_chunk_forward_, (scratch, x, weight, target, bias, *options, True, True),
                          test_utils=tests)
    ops.fused_linear_log_probs_chunk_forward_(scratch, x, weight, target, bias, *options, True, True)
    torch.library.opcheck(
        ops.fused_linear_log_probs_chunk_backward_,
        (scratch, torch.zeros(30, 16, device=device), torch.zeros(30, device=device), x, weight, target, *results[:4], *upstream, *options,
         True, True), test_utils=tests)


@pytest.mark.parametrize("device", devices())
def test_compile(device):
    """C119: one graph without breaks; row counts do not recompile; ignored labels as in eager mode."""
    def loss(x, weight, target):
        out = fused_linear_log_probs(x * 2, weight, target, temperature=0.8, return_entropy=True, return_lse=True, return_hits=True)
        return (out.logp * 3 - 0.1 * out.entropy + out.lse.sin()).sum() + out.hits.sum()

    def run(f, data):
        x, weight = leaves(*data[:2])
        value = f(x, weight, data[2])
        value.backward()
        return value.detach(), x.grad, weight.grad

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled, inductor = torch.compile(loss, fullgraph=True, backend=counter), torch.compile(loss, fullgraph=True)
    for rows in (5, 9, 12, 33):
        data = make(rows, 16, 40, torch.float32, device)
        for got, want in zip(run(compiled, data), run(loss, data), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2
    for dtype in (torch.float32, torch.bfloat16):
        data = make(20, 16, 40, dtype, device)
        for got, want in zip(run(inductor, data), run(loss, data), strict=True):
            torch.testing.assert_close(got, want, rtol=max(1e-4, 8 * UNIT_ROUNDOFF[dtype]), atol=max(1e-5, 8 * UNIT_ROUNDOFF[dtype]))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*data), loss(*data))


@pytest.mark.parametrize("device", devices()[1:])
def test_graph_capture(device):
    """Forward and backward in a CUDA graph; no row is left out there, so the numbers of ignored rows may change between replays."""
    x, weight, target = make(300, 64, 515, torch.bfloat16, device)
    x, weight = leaves(x, weight)

    def run():
        out = fused_linear_log_probs(x, weight, target, return_entropy=True)
        return out.logp, *torch.autograd.grad(out.logp.sum() + out.entropy.sum(), (x, weight))

    side = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        target.copy_(make(300, 64, 515, torch.bfloat16, device, ignored=0.6)[2])
        graph.replay()
        for got, want in zip(captured, run(), strict=True):
            assert (got - want).float().norm() <= 0.01 * want.float().norm()
