"""fused_linear_cross_entropy against its fp64 definition and against eager PyTorch: values and gradients of every option."""

import pytest
import torch
import torch.nn.functional as F

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.cross_entropy import liger_cross_entropy
from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy, liger_fused_linear_cross_entropy
from liger_kernel.ops.fused_linear_cross_entropy.cases import DTYPES, OPTIONS, SHAPES, Bounds
from liger_kernel.ops.fused_linear_cross_entropy.ref import eager, reference


def make(rows, hidden, vocab, dtype, device="cpu", ignored=0.25):
    x = torch.randn(rows, hidden, device=device).to(dtype)
    weight = (torch.randn(vocab, hidden, device=device) * 2 / hidden**0.5).to(dtype)
    target = torch.randint(vocab, (rows,), device=device)
    if rows > 2:
        target[torch.rand(rows, device=device) < ignored] = -100
        target[0] = 0
    return x, weight, target


def gradients(function, x, weight, target, bias=None, upstream=None, **options):
    """(loss, dx, dw, db) as autograd gives them."""
    tensors = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    loss = function(tensors[0], tensors[1], target, tensors[2], **options)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(upstream)
    return loss.detach(), *(None if t is None else t.grad for t in tensors)


def with_tensors(options, weight):
    """The options of cases.py, with bias and class weights made."""
    options, device = dict(options), weight.device
    if options.pop("bias", False):
        options["bias"] = torch.randn(weight.shape[0], device=device).to(weight.dtype)
    if options.get("ce_weight"):
        options["ce_weight"] = torch.rand(weight.shape[0], device=device) + 0.1
    return options


def check(x, weight, target, against_eager=False, **options):
    ours = gradients(fused_linear_cross_entropy, x, weight, target, **options)
    options.pop("logits_memory", None)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    truth = gradients(reference, x.double(), weight.double(), target, **wide)
    theirs = gradients(eager, x, weight, target, **options) if against_eager else (None,) * 4
    upstream = options.pop("upstream", None)
    bounds = Bounds(x, weight, target, **options)
    assert ours[0].dtype == torch.float32
    if upstream is None:
        allowed = (bounds.loss, bounds.dx(), bounds.dw(), bounds.db())
    else:
        size = upstream.abs().max().double()
        allowed = (bounds.loss, size * bounds.dx(), size * bounds.dw(), size * bounds.db())
    for what, got, want, bound, other in zip(("loss", "dx", "dw", "db"), ours, truth, allowed, theirs, strict=True):
        if got is not None:
            assert_accurate(got, want, bound, other, what)
    return ours


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    """C13: vocabularies off every tile, 129920 and odd ones included."""
    torch.manual_seed(0)
    check(*make(*shape, dtype, device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_less_accurate_than_eager(dtype, device):
    torch.manual_seed(1)
    check(*make(700, 96, 515, dtype, device), against_eager=True)
    check(*make(700, 96, 515, dtype, device), against_eager=True, logits_memory=1)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("chunked", [False, True], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, reduction, dtype, chunked, device):
    """C6: every option has the numbers of its definition, under every reduction, in one chunk and in several."""
    torch.manual_seed(2)
    rows = (1300 if device != "cpu" else 420) if chunked else 48
    x, weight, target = make(rows, 40, 83, dtype, device)
    options = with_tensors(OPTIONS[name], weight)
    target[target == -100] = options.get("ignore_index", -100)
    if reduction == "none":
        options["upstream"] = torch.randn(rows, device=device)
    check(x, weight, target, reduction=reduction, logits_memory=int(chunked), **options)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_same_numbers_as_the_unfused_loss(reduction, device):
    """C6, C29: loss, z-loss, accuracy and predictions of the plain op on x weight^T + bias; ties go to the first index."""
    torch.manual_seed(3)
    x, weight, target = make(300, 32, 77, torch.float32, device)
    x[5] = 0  # a row of equal logits
    bias = torch.zeros(77, device=device)
    target[5] = 0
    options = dict(label_smoothing=0.1, lse_square_scale=1e-2, softcap=8.0, ce_weight=torch.rand(77, device=device) + 0.5)
    ours = liger_fused_linear_cross_entropy(x, weight, target, bias, reduction=reduction, return_z_loss=True, return_token_accuracy=True,
                                            return_predicted_tokens=True, **options)
    options["weight"] = options.pop("ce_weight")
    plain = liger_cross_entropy(F.linear(x, weight, bias), target, reduction=reduction, return_z_loss=True, return_token_accuracy=True,
                                return_predicted_tokens=True, **options)
    torch.testing.assert_close(ours.loss, plain.loss)
    torch.testing.assert_close(ours.z_loss, plain.z_loss)
    torch.testing.assert_close(ours.token_accuracy, plain.token_accuracy)
    assert torch.equal(ours.predicted_tokens, plain.predicted_tokens)
    assert ours.predicted_tokens[5] == 0 and bool((ours.predicted_tokens[target == -100] == -1).all())
    assert ours.predicted_tokens.dtype == torch.int64 and ours.token_accuracy.dtype == torch.float32
    without = gradients(liger_fused_linear_cross_entropy, x, weight, target, bias, torch.ones_like(ours.loss), reduction=reduction)
    with_flags = gradients(
        lambda *a, **k: liger_fused_linear_cross_entropy(*a, **k, return_token_accuracy=True, return_predicted_tokens=True).loss,
        x, weight, target, bias, torch.ones_like(ours.loss), reduction=reduction)
    for a, b in zip(without, with_flags, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_label_ignored(reduction, dtype, device):
    """C5: loss, accuracy and gradients 0, predictions -1, and nothing of the ignored rows is read."""
    x, weight, _ = make(6, 16, 11, dtype, device)
    x[2] = float("nan")
    target = torch.full((6,), -100, device=device)
    bias = torch.randn(11, device=device).to(dtype)
    loss, dx, dw, db = gradients(liger_fused_linear_cross_entropy, x, weight, target, bias,
                                 torch.ones(6, device=device) if reduction == "none" else None, reduction=reduction)
    for t in (loss, dx, dw, db):
        assert torch.equal(t, torch.zeros_like(t))
    out = liger_fused_linear_cross_entropy(x, weight, target, reduction=reduction, return_token_accuracy=True, return_predicted_tokens=True)
    assert float(out.token_accuracy.sum()) == 0 and bool((out.predicted_tokens == -1).all())


@pytest.mark.parametrize("device", devices())
def test_zero_rows(device):
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.zeros(0, 16, device=device, dtype=dtype), torch.ones(9, 16, device=device, dtype=dtype)
        loss, dx, dw, _ = gradients(liger_fused_linear_cross_entropy, x, weight, torch.zeros(0, device=device, dtype=torch.int64))
        assert float(loss) == 0 and dx.shape == (0, 16) and torch.equal(dw, torch.zeros_like(dw))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("logits_memory", [0, 1])
def test_long_weight_gradient(logits_memory, device):
    """C17: dW of bf16 over many chunks is summed in fp32 and rounded once."""
    torch.manual_seed(4)
    x, weight, target = make(4096, 64, 4096, torch.bfloat16, device, ignored=0.0)
    _, dx, dw, _ = gradients(fused_linear_cross_entropy, x, weight, target, logits_memory=logits_memory)
    _, dx64, dw64, _ = gradients(reference, x.double(), weight.double(), target)
    u = UNIT_ROUNDOFF[torch.bfloat16]
    assert (dw.double() - dw64).norm() <= 1.5 * u * dw64.norm()
    assert (dx.double() - dx64).norm() <= 2 * u * dx64.norm()


@pytest.mark.parametrize("device", devices())
def test_vocabulary_of_262144(device):
    """C31."""
    torch.manual_seed(5)
    x, weight, target = make(32, 64, 262144, torch.bfloat16, device)
    loss, dx, dw, _ = gradients(fused_linear_cross_entropy, x, weight, target)
    truth, dx64, dw64, _ = gradients(reference, x.double(), weight.double(), target)
    u = UNIT_ROUNDOFF[torch.bfloat16]
    assert (loss.double() - truth).abs() <= 2 * u * truth.abs()
    assert (dx.double() - dx64).norm() <= 3 * u * dx64.norm()
    assert (dw.double() - dw64).norm() <= 3 * u * dw64.norm()


@pytest.mark.parametrize("device", devices())
def test_layouts(device):
    """C23: sliced, transposed and misaligned hidden states, weights and labels."""
    torch.manual_seed(6)
    for dtype, hidden in ((torch.float32, 33), (torch.bfloat16, 64)):
        x, weight, target = make(50, hidden, 70, dtype, device)
        expected = gradients(fused_linear_cross_entropy, x, weight, target)
        for layout in LAYOUTS:
            a, b = strided(x, layout).detach().requires_grad_(), strided(weight, layout).detach().requires_grad_()
            loss = fused_linear_cross_entropy(a, b, strided(target, "every_other"))[0]
            loss.backward()
            for got, want in zip((loss, a.grad, b.grad), expected, strict=False):
                torch.testing.assert_close(got, want, rtol=8 * UNIT_ROUNDOFF[dtype], atol=UNIT_ROUNDOFF[dtype] / 8)
    hidden = torch.randn(4, 9, 64, device=device, requires_grad=True)
    weight, labels = torch.randn(70, 64, device=device), torch.randint(70, (4, 8), device=device)
    liger_fused_linear_cross_entropy(hidden[:, :-1].reshape(-1, 64), weight, labels.flatten()).backward()
    got, hidden.grad = hidden.grad, None
    F.cross_entropy((hidden[:, :-1] @ weight.T).flatten(0, 1), labels.flatten()).backward()
    torch.testing.assert_close(got, hidden.grad)
    direct = liger_fused_linear_cross_entropy(hidden[:, :-1], weight, labels)  # leading dimensions are flattened
    torch.testing.assert_close(direct, F.cross_entropy((hidden[:, :-1] @ weight.T).flatten(0, 1), labels.flatten()))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_expanded_upstream(reduction, device):
    torch.manual_seed(7)
    x, weight, target = make(40, 16, 30, torch.float32, device)
    once = gradients(lambda *a: fused_linear_cross_entropy(*a, reduction=reduction)[0].sum() * 3, x, weight, target)
    by_hand = gradients(fused_linear_cross_entropy, x, weight, target, reduction="sum")
    torch.testing.assert_close(once[1], 3 * by_hand[1])
    torch.testing.assert_close(once[2], 3 * by_hand[2])


@pytest.mark.parametrize("device", devices())
def test_fp16_mean_under_a_loss_scaler(device):
    """The gradients of a mean over many rows are too small for fp16 before the scaler's factor arrives; they are not lost."""
    torch.manual_seed(8)
    x, weight, target = make(2000, 64, 1000, torch.float16, device, ignored=0.0)
    weight = weight / 16
    scale = torch.tensor(65536.0, device=device)
    _, dx, dw, _ = gradients(fused_linear_cross_entropy, x, weight, target, upstream=scale)
    _, dx64, dw64, _ = gradients(reference, x.double(), weight.double(), target, upstream=scale.double())
    assert (dx.double() - dx64).norm() <= 2 * UNIT_ROUNDOFF[torch.float16] * dx64.norm()
    assert (dw.double() - dw64).norm() <= 2 * UNIT_ROUNDOFF[torch.float16] * dw64.norm()


def test_every_cpu_variant(monkeypatch):
    """C92: without a feature (AVX-512, bf16 products) the other paths give the same within their rounding; an unknown name is an
    error that lists the known ones."""
    torch.manual_seed(9)
    x, weight, target = make(500, 40, 333, torch.bfloat16)
    bias = torch.randn(333).bfloat16()
    results = []
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_FUSED_LINEAR_CROSS_ENTROPY", variant)
        try:
            results.append(check(x, weight, target, bias=bias, logits_memory=1))
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
    u = UNIT_ROUNDOFF[torch.bfloat16]
    for other in results[1:]:
        for got, want in zip(other[1:], results[0][1:], strict=True):
            assert (got.double() - want.double()).norm() <= 2 * u * want.double().norm()
    monkeypatch.setenv("LIGER_FUSED_LINEAR_CROSS_ENTROPY", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        fused_linear_cross_entropy(x, weight, target)
