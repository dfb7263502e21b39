"""cross_entropy: extra outputs, errors, in-place form, repeated backward, the compiler and every variant."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, UNIT_ROUNDOFF, devices
from liger_kernel.ops.cross_entropy import (
    CrossEntropyOutput,
    LigerCrossEntropyFunction,
    LigerCrossEntropyLoss,
    cross_entropy_backward,
    cross_entropy_forward,
    labels,
    liger_cross_entropy,
)


def make(rows, vocab, device, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    x = (3 * torch.randn(rows, vocab, device=device)).to(dtype)
    target = torch.randint(vocab, (rows,), device=device)
    target[1] = -100
    return x, target


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_extra_outputs(reduction, device):
    """C29: accuracy, predictions and z with ties and ignored rows; loss and gradient unchanged by them."""
    for vocab in (5, 37, 1000):
        x, target = make(6, vocab, device)
        x[2, 1] = x[2, 3] = 50.0  # a tie: the first wins
        x[3, 0] = x[3, vocab - 1] = 50.0
        target[2], target[3] = 1, vocab - 1
        target[4] = x[4].argmax()
        options = {"reduction": reduction, "lse_square_scale": 0.01}
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        out = liger_cross_entropy(a, target, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True, **options)
        plain = liger_cross_entropy(b, target, **options)
        assert isinstance(out, CrossEntropyOutput)
        torch.testing.assert_close(out.loss, plain, rtol=1e-6, atol=0)
        out.loss.sum().backward(), plain.sum().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8)
        predicted = x.argmax(-1)
        predicted[2], predicted[3], predicted[1] = 1, 0, -1
        assert torch.equal(out.predicted_tokens, predicted)
        hits = (predicted == target).float()
        accuracy = hits if reduction == "none" else hits.sum() / 5
        assert torch.equal(out.token_accuracy, accuracy) and out.token_accuracy.dtype == torch.float32
        z = torch.where(target != -100, 0.01 * torch.logsumexp(x, -1).square(), 0)
        z = z if reduction == "none" else z.sum() / (5 if reduction == "mean" else 1)
        torch.testing.assert_close(out.z_loss, z, rtol=1e-5, atol=0)
        assert not out.z_loss.requires_grad and not out.token_accuracy.requires_grad
        only = liger_cross_entropy(x, target, return_predicted_tokens=True, **options)
        assert only.z_loss is None and only.token_accuracy is None and torch.equal(only.predicted_tokens, predicted)


@pytest.mark.parametrize("device", devices())
def test_prediction_of_capped_rows(device):
    """The argmax is of the capped row: logits far beyond the cap are equal, and the first of them wins."""
    x = torch.full((2, 50), -1.0, device=device)
    x[0, 7], x[0, 3] = 900.0, 800.0
    x[1, 7] = float("nan")
    out = liger_cross_entropy(x, torch.tensor([7, 7], device=device), softcap=5.0, return_predicted_tokens=True, return_token_accuracy=True)
    assert out.predicted_tokens.tolist() == [3, 7]
    assert float(out.token_accuracy) == 0.5


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_backward(reduction, dtype, device):
    """C87, departure 12: upstream 1 then 3 accumulates 4; without retain_graph the second call is refused."""
    x, target = make(5, 24, device, dtype)
    a = x.clone().requires_grad_()
    loss = liger_cross_entropy(a, target, reduction=reduction)
    upstream = torch.ones_like(loss)
    loss.backward(upstream, retain_graph=True)
    first = a.grad.clone()
    loss.backward(3 * upstream)
    torch.testing.assert_close(a.grad, 4 * first, rtol=3 * UNIT_ROUNDOFF[dtype], atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward(upstream)
    (grad,) = torch.autograd.grad(liger_cross_entropy(a, target), a, create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match="cross_entropy: its gradient has no derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("device", devices())
def test_in_place(device):
    """Departure 11: the gradient takes the logits' memory, and whoever else saved them is told."""
    x, target = make(6, 33, device)
    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(2 * liger_cross_entropy(leaf, target), leaf)[0]
    logits = leaf * 1.0
    loss = LigerCrossEntropyLoss(in_place=True)(logits, target)
    stored = logits.detach().clone()
    torch.testing.assert_close(2 * stored, expected)
    (2 * loss).backward()
    torch.testing.assert_close(leaf.grad, expected)

    logits = (leaf * 1.0)[:, :30]  # strided rows
    loss = liger_cross_entropy(logits, target.clamp(max=29), in_place=True, reduction="sum")
    grads = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads) and float(grads[0].norm()) > 0

    logits = leaf * 1.0
    other = logits.exp().sum() + logits.square().sum()  # square saves the logits
    loss = liger_cross_entropy(logits, target, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()
    with pytest.raises(RuntimeError, match="leaf"):
        liger_cross_entropy(leaf, target, in_place=True)
    same = x.clone()
    liger_cross_entropy(same, target, in_place=True)  # nothing to differentiate: nothing is written
    assert torch.equal(same, x)
    row = leaf[:1] * 1.0
    torch.testing.assert_close(  # rows that share memory
        liger_cross_entropy(row.expand(6, 33), target, in_place=True), liger_cross_entropy(row.repeat(6, 1), target))


@pytest.mark.parametrize("device", devices())
def test_values_after_forward(device):
    """Departure 11: the caller's logits keep their values, ignored rows included."""
    x, target = make(6, 40, device)
    for leaf in (x.clone(), x.clone().requires_grad_()):
        liger_cross_entropy(leaf, target)
        assert torch.equal(leaf.detach(), x)
    with torch.no_grad():
        loss = liger_cross_entropy(x.clone().requires_grad_(), target)
    assert not loss.requires_grad


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_cap_with_and_without_a_gradient(softcap, device):
    """C11: the capped loss is one number in training, in evaluation and compiled, and the logits count for no more than the cap."""
    x, target = make(6, 40, device)
    want = torch.nn.functional.cross_entropy(softcap * torch.tanh(x / softcap), target)
    loss = LigerCrossEntropyLoss(softcap=softcap)
    compiled = torch.compile(loss, fullgraph=True)
    for function in (loss, compiled):
        with torch.no_grad():
            torch.testing.assert_close(function(x, target), want)
        torch.testing.assert_close(function(x.clone().requires_grad_(), target).detach(), want)
    far = torch.full_like(x, -1e4).scatter(1, target.clamp(min=0)[:, None], 1e4)  # one class at the cap, the others at its negative
    p = 1 / (1 + 39 * torch.exp(torch.tensor(-2 * softcap)))
    torch.testing.assert_close(loss(far, target).cpu(), -p.log())


@pytest.mark.parametrize("device", devices())
def test_zero_rows(device):
    """C56 for the loss: 0 and an empty gradient."""
    x = torch.zeros(0, 11, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.int64, device=device)
    loss = liger_cross_entropy(x, target)
    loss.backward()
    assert loss.item() == 0 and x.grad.shape == (0, 11)
    assert liger_cross_entropy(x, target, reduction="none").shape == (0,)


@pytest.mark.parametrize("device", devices())
def test_errors(device):
    """The contract's assertions; the logits are untouched."""
    x, target = make(4, 8, device)
    before = x.clone()
    bad = target.clone()
    for value, bound in ((8, "Expected < 8"), (9000, "Expected < 8"), (-1, "Expected >= 0")):
        bad[2] = value
        with pytest.raises(AssertionError, match=f"Target {value} is out of bounds. {bound}"):
            liger_cross_entropy(x, bad)
    for flag in ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"):
        with pytest.raises(AssertionError, match=flag):
            liger_cross_entropy(x, target, **{flag: 1})
    with pytest.raises(AssertionError, match="class weight has 7"):
        liger_cross_entropy(x, target, torch.ones(7, device=device))
    with pytest.raises(AssertionError, match="floating"):
        liger_cross_entropy(x, target, torch.ones(8, device=device, dtype=torch.int64))
    for options in ({"label_smoothing": 1.5}, {"label_smoothing": -0.1}, {"label_smoothing": float("nan")}, {"reduction": "average"},
                    {"softcap": 0.0}, {"softcap": -1.0}):
        for call in (LigerCrossEntropyLoss, lambda **options: liger_cross_entropy(x, target, **options)):
            with pytest.raises(AssertionError, match=next(iter(options))):
                call(**options)
    for bad in (target.float() + 0.5, target > 0, target.to(torch.complex64)):  # torch's own exception for them
        for call in (liger_cross_entropy, LigerCrossEntropyFunction.apply, LigerCrossEntropyLoss()):
            with pytest.raises(RuntimeError, match=r"target.* dtype|dtype.*[Tt]arget"):
                call(x, bad, *([None] if call == LigerCrossEntropyFunction.apply else []))
    assert torch.equal(liger_cross_entropy(x, target.int()), liger_cross_entropy(x, target))
    with pytest.raises(CORE_ERROR, match="target has 3 elements"):
        liger_cross_entropy(x, target[:3])
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        liger_cross_entropy(x.double(), target)
    assert torch.equal(x, before)


@pytest.mark.parametrize("device", devices())
def test_out_of_range_reads_nothing(device):
    """Departure 17: the kernel itself gives NaN for such a row and reads no logit by it."""
    x, target = make(3, 8, device)
    target[0], target[1], target[2] = 2**40, -7, 3
    stats = torch.ops.liger_kernel.cross_entropy_label_stats(target, None, 8, -100)
    assert stats[2:5].tolist() == [3, 1, 1]
    weight = torch.ones(8, device=device)
    arguments = (x, target, weight, stats, None, -100, 0.0, 0.0, 0.0, 1.0, False, False, True, False, True, True)
    loss, _, hit, prediction, grad = torch.ops.liger_kernel.cross_entropy_forward(*arguments)
    assert loss.isnan().tolist() == [True, True, False] and grad.isnan().any(-1).tolist() == [True, True, False]
    assert prediction[:2].tolist() == [-1, -1] and hit[:2].tolist() == [0, 0]


@pytest.mark.parametrize("device", devices())
def test_torch_call_shapes(device):
    """What torch's function takes beyond (rows, classes): handed to torch; our options are refused there, not dropped."""
    x = torch.randn(3, 5, 4, device=device)
    target = torch.randint(5, (3, 4), device=device)
    torch.testing.assert_close(liger_cross_entropy(x, target), torch.nn.functional.cross_entropy(x, target))
    soft = torch.softmax(torch.randn(3, 5, device=device), -1)
    loss = LigerCrossEntropyLoss(label_smoothing=0.1)(x[:, :, 0], soft)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x[:, :, 0], soft, label_smoothing=0.1))
    torch.testing.assert_close(liger_cross_entropy(x[0, :, 0], target[0, 0]), torch.nn.functional.cross_entropy(x[0, :, 0], target[0, 0]))
    with pytest.raises(ValueError, match="softcap, return_z_loss"):
        liger_cross_entropy(x, target, softcap=3.0, return_z_loss=True)


@pytest.mark.parametrize("device", devices())
def test_label_stats(device):
    target = torch.tensor([1, 4, -100, 0, 4], device=device)
    weight = torch.rand(5, device=device)
    stats = labels.ask(target, 5, class_weight=weight)
    assert stats.count() == 4 and stats.wait() == (4, 0, 0)
    values = stats.device.view(torch.float32)
    expected = torch.stack([torch.tensor(0.25), 1 / weight[[1, 4, 0, 4]].sum().cpu(), weight.sum().cpu()])
    torch.testing.assert_close(values[[0, 1, 5]].cpu(), expected)
    torch.manual_seed(1)
    for rows in (1, 1023, 1025, 20000):
        long = torch.randint(-2, 12, (2 * rows,), device=device)[::2]
        assert labels.ask(long, 10, ignore_index=3).wait() == (int((long != 3).sum()), int((long < 0).sum()), int((long >= 10).sum()))
    with pytest.raises(AssertionError, match="Target 4 is out of bounds. Expected < 4 .2 of 4"):
        labels.ask(target, 4).count()


@pytest.mark.parametrize("device", devices())
def test_row_scale_and_token_scaling(device):
    """What the fused linear loss passes: a factor per row, the target's probability, a scale of the logits."""
    x, target = make(5, 60, device)
    stats = labels.ask(target, 60).device
    factor = torch.rand(5, device=device)
    for token_scaling in (False, True):
        for cap, scale in ((0.0, 1.0), (4.0, 1.0), (0.0, 0.5), (4.0, 2.0)):
            arguments = (None, stats, factor, -100, 0.1, 0.01, cap, scale, True, token_scaling)
            loss, _, _, _, grad = torch.ops.liger_kernel.cross_entropy_forward(x, target, *arguments, True, True, False, False)
            x64 = x.double().requires_grad_()
            v = x64 * scale
            v = cap * torch.tanh(v / cap) if cap else v
            valid = target != -100
            log_p = torch.log_softmax(v, -1)
            own = log_p.gather(-1, torch.where(valid, target, 0)[:, None])[:, 0]
            f = factor * valid * (own.exp().detach() if token_scaling else 1) / valid.sum()
            truth = (0.9 * -own - 0.1 * log_p.mean(-1) + 0.01 * torch.logsumexp(v, -1).square()) * f
            torch.testing.assert_close(loss.double(), truth.detach(), rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(grad.double(), torch.autograd.grad(truth.sum(), x64)[0], rtol=1e-4, atol=1e-7)
            copy = x.clone()
            again = torch.ops.liger_kernel.cross_entropy_forward_(copy, target, *arguments, True, False, False)
            assert torch.equal(copy, grad) and torch.equal(again[0], loss)


@pytest.mark.parametrize("device", devices())
def test_scale(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for cols in (1, 31, 64, 1003):
            g = torch.randn(7, cols + 1, device=device).to(dtype)[:, 1:]
            for factor in (torch.tensor(0.5, device=device), torch.tensor(1.0, device=device), torch.arange(7.0, device=device) / 4):
                expected = (g.float() * factor.reshape(-1, 1)).to(dtype)
                assert torch.equal(torch.ops.liger_kernel.cross_entropy_scale(g, factor), expected)
                copy = g.clone()
                torch.ops.liger_kernel.cross_entropy_scale_(copy, factor)
                assert torch.equal(copy, expected)


@pytest.mark.parametrize("device", devices())
def test_opcheck_and_compile(device):
    """Visible to the compiler; row counts do not recompile; same numbers."""
    x, target = make(6, 32, device)
    ops, checks = torch.ops.liger_kernel, ("test_schema", "test_faketensor")
    stats = ops.cross_entropy_label_stats(target, None, 32, -100)
    options = (target, None, stats, None, -100, 0.1, 0.0, 0.0, 1.0, True, False)
    torch.library.opcheck(ops.cross_entropy_label_stats, (target, None, 32, -100), test_utils=checks)
    torch.library.opcheck(ops.cross_entropy_forward, (x, *options, True, True, True, True), test_utils=checks)
    torch.library.opcheck(ops.cross_entropy_forward_, (x.clone(), *options, True, True, True), test_utils=checks)
    torch.library.opcheck(ops.cross_entropy_scale, (x, torch.tensor(2.0, device=device)), test_utils=checks)
    torch.library.opcheck(ops.cross_entropy_scale_, (x.clone(), torch.tensor(2.0, device=device)), test_utils=checks)

    def step(a, t):
        out = liger_cross_entropy(a * 2, t, label_smoothing=0.1, return_token_accuracy=True, return_z_loss=True, lse_square_scale=0.1)
        return out.loss * 3, out.token_accuracy, out.z_loss

    def run(function, x, target):
        a = x.clone().requires_grad_()
        loss, accuracy, z = function(a, target)
        loss.backward()
        return loss.detach(), accuracy, z, a.grad

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        x, target = make(rows, 32, device)
        for got, want in zip(run(compiled, x, target), run(step, x, target), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    x, target = make(8, 32, device)
    for got, want in zip(run(torch.compile(step, fullgraph=True), x, target), run(step, x, target), strict=True):
        torch.testing.assert_close(got, want)
    module = torch.compile(LigerCrossEntropyLoss(reduction="none", in_place=True), fullgraph=True)
    a = x.clone().requires_grad_()
    module(a * 1, target).sum().backward()
    b = x.clone().requires_grad_()
    liger_cross_entropy(b, target, reduction="sum").backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("device", devices())
def test_every_variant(device, monkeypatch):
    """C33: bf16 logits through every implementation of this machine; an unknown name is an error that lists them."""
    from liger_kernel import _native

    x, target = make(6, 4104, device, torch.bfloat16)
    expected = liger_cross_entropy(x.double().float(), target)
    names = next(names for name, _, names in _native.list_ops() if name == "cross_entropy")
    ran = 0
    for variant in names:
        monkeypatch.setenv("LIGER_CROSS_ENTROPY", variant)
        try:
            a = x.clone().requires_grad_()
            loss = liger_cross_entropy(a, target)
            loss.backward()
            loss = loss.detach()
        except CORE_ERROR as e:
            assert "cannot run" in str(e)
            continue
        ran += 1
        assert abs(float(loss) - float(expected)) <= 2 * UNIT_ROUNDOFF[torch.bfloat16] * float(expected)
        assert torch.equal(a.grad[1], torch.zeros_like(a.grad[1])) and float(a.grad[0].float().sum().abs()) < 1e-3
    assert ran >= 1
    monkeypatch.setenv("LIGER_CROSS_ENTROPY", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        liger_cross_entropy(x, target)


@pytest.mark.parametrize("device", devices())
def test_helpers_and_positions(device):
    """apply's eleven positions and the helpers without autograd."""
    x, target = make(5, 16, device)
    x.requires_grad_()
    positional = LigerCrossEntropyFunction.apply(x, target, None, -100, 0.0, 0.1, "sum", None, False, False, False)
    assert len(positional) == 4 and positional[1:] == (None, None, None)
    loss, z, accuracy, prediction, buffer = cross_entropy_forward(x, target, None, -100, 0.0, 0.1, "sum", None, False)
    assert torch.equal(loss, positional[0].detach()) and z is None and accuracy is None and prediction is None
    scaled = cross_entropy_backward(buffer, torch.tensor(2.0, device=device))
    torch.testing.assert_close(scaled, torch.autograd.grad(2 * positional[0], x)[0])
    assert "reduction='mean'" in repr(LigerCrossEntropyLoss())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_capture():
    """Captured without a host check; a replay follows the new inputs."""
    x, target = make(16, 1000, "cuda", torch.bfloat16)
    x.requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(liger_cross_entropy(x, target), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = liger_cross_entropy(x, target)
        (grad,) = torch.autograd.grad(loss, x)
    x.data.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    expected = liger_cross_entropy(x, target)
    assert torch.equal(loss, expected) and torch.equal(grad, torch.autograd.grad(expected, x)[0])
