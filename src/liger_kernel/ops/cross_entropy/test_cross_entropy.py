"""cross_entropy against its fp64 definition and against eager PyTorch: values and gradients of every option."""

import pytest
import torch

from liger_kernel.core.accuracy import LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction, LigerCrossEntropyLoss, liger_cross_entropy
from liger_kernel.ops.cross_entropy.cases import DTYPES, LARGE, OPTIONS, SHAPES, grad_bound, loss_bound
from liger_kernel.ops.cross_entropy.ref import eager, reference, rows


def make(rows, vocab, dtype, device, scale=3.0, ignore=True):
    x = (torch.randn(rows, vocab, device=device) * scale).to(dtype)
    target = torch.randint(vocab, (rows,), device=device)
    if ignore and rows > 2:
        target[1] = -100
    return x, target


def truth_of(x, target, upstream, **options):
    """fp64 loss and gradient."""
    x64 = x.double().requires_grad_()
    if options.get("weight") is not None:
        options = {**options, "weight": options["weight"].double()}
    loss, _ = reference(x64, target, **options)
    (grad,) = torch.autograd.grad(loss, x64, upstream.double().expand_as(loss))
    return loss.detach(), grad


def check(x, target, **options):
    if options.get("weight") is True:
        options["weight"] = torch.rand(x.shape[1], device=x.device) + 0.1
    ours = x.clone().requires_grad_()
    loss = liger_cross_entropy(ours, target, **options)
    assert loss.dtype == x.dtype
    upstream = torch.randn_like(loss)
    loss.backward(upstream)
    truth, grad = truth_of(x, target, upstream, **options)
    assert_accurate(loss, truth, loss_bound(x, target, **options), what="loss")
    assert_accurate(ours.grad, grad, grad_bound(x, target, upstream, grad, **options), what="grad")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    """C26 in part: every width of tail, both sides of 65536."""
    torch.manual_seed(0)
    check(*make(*shape, dtype, device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_vocabulary(shape, device):
    """C26: rows of up to 1048576."""
    torch.manual_seed(1)
    for dtype in (torch.bfloat16, torch.float32):
        check(*make(*shape, dtype, device))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(dtype, name, device):
    torch.manual_seed(2)
    for shape in ((7, 33), (5, 500), (4, 4104), (3, 4099)):
        check(*make(*shape, dtype, device), **OPTIONS[name])


@pytest.mark.parametrize("device", devices())
def test_against_torch(device):
    """fp32: torch's own function with its options; no larger error than twice torch's against fp64."""
    torch.manual_seed(3)
    x, target = make(64, 1000, torch.float32, device)
    for weight in (None, torch.rand(1000, device=device)):
        for smoothing in (0.0, 0.3):
            for reduction in ("mean", "sum", "none"):
                options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
                theirs = eager(x, target, **options)
                truth, _ = truth_of(x, target, torch.ones((), device=device), **options)
                assert_accurate(liger_cross_entropy(x, target, **options), truth, 1e-5 * float(truth.abs().max()), theirs, "loss")


@pytest.mark.parametrize("device", devices())
def test_per_token_losses_and_vector_upstream(device):
    """C3, C19: "none" keeps the rows, and its backward takes one factor per row."""
    torch.manual_seed(4)
    x = torch.randn(4, 7, device=device)
    target = torch.tensor([3, -100, 0, 6], device=device)
    mask = torch.tensor([1.0, 0.0, 0.0, 1.0], device=device)
    for objective in (lambda t: t.square().sum(), lambda t: (t * mask).sum() / mask.sum()):
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        loss = liger_cross_entropy(a, target, reduction="none")
        assert loss.shape == (4,) and loss[1] == 0
        objective(loss).backward()
        objective(torch.nn.functional.cross_entropy(b, target, reduction="none")).backward()
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-7)
        assert a.grad.norm() > 0


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_label_ignored(reduction, device):
    """C5, departure 18: loss, accuracy and gradients are 0, predictions -1."""
    x = torch.randn(6, 11, device=device, requires_grad=True)
    target = torch.full((6,), -100, device=device)
    for weight in (None, torch.rand(11, device=device)):
        out = liger_cross_entropy(x, target, weight, reduction=reduction, label_smoothing=0.1, lse_square_scale=0.1,
                                  return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True)
        (grad,) = torch.autograd.grad(out.loss.sum(), x)
        for zero in (out.loss, out.z_loss, out.token_accuracy, grad):
            assert torch.equal(zero, torch.zeros_like(zero))
        assert torch.equal(out.predicted_tokens, target.new_full((6,), -1))


@pytest.mark.parametrize("device", devices())
def test_softcap_far_beyond_the_cap(device):
    """C9: capped values stay within the cap; the slope is 1 - tanh^2."""
    torch.manual_seed(5)
    x = torch.linspace(-124, 124, 64, device=device).repeat(3, 1)
    target = torch.tensor([0, 63, 32], device=device)
    options = {"softcap": 30.0, "reduction": "none"}
    loss = liger_cross_entropy(x, target, **options)
    assert float(loss.max()) <= 60 + torch.log(torch.tensor(64.0)) + 1e-3
    check(x, target, **options)


@pytest.mark.parametrize("device", devices())
def test_bf16_logits_lose_nothing(device):
    """C18: bf16 logits give the loss and gradient of the same values in fp32, but for the last rounding."""
    torch.manual_seed(6)
    x = torch.randn(64, 64000, device=device).bfloat16()
    target = torch.randint(64000, (64,), device=device)
    a, b = x.clone().requires_grad_(), x.float().requires_grad_()
    u = UNIT_ROUNDOFF[torch.bfloat16]
    loss, wide = liger_cross_entropy(a, target), liger_cross_entropy(b, target)
    assert abs(float(loss.detach()) - float(wide.detach())) <= 2 * u * float(wide.detach())
    loss.backward(), wide.backward()
    assert ((a.grad.double() - b.grad.double()).abs() <= 1.5 * u * b.grad.double().abs() + 1e-30).all()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_confident_rows(dtype, device):
    """p_y near 1: loss and target gradient keep their relative precision, where lse - x_y and p_y - 1 would cancel."""
    for gap in (2.0, 8.0, 12.0, 20.0, 60.0):
        x = torch.zeros(2, 40, device=device, dtype=dtype)
        x[:, 5] = gap
        target = torch.tensor([5, 6], device=device)
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        loss = liger_cross_entropy(a, target, reduction="none")
        truth = torch.log1p(39 * torch.exp(-b.detach()[0, 5]))
        assert abs(float(loss[0]) - float(truth)) <= (1.5 * UNIT_ROUNDOFF[dtype] + 1e-6) * float(truth) + 2.0**-25
        loss.sum().backward()
        own = -39 * torch.exp(-b.detach()[0, 5]) / (1 + 39 * torch.exp(-b.detach()[0, 5]))
        assert abs(float(a.grad[0, 5]) - float(own)) <= (1.5 * UNIT_ROUNDOFF[dtype] + 1e-6) * abs(float(own)) + 2.0**-25


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    """C22, departure 10: sliced, misaligned, row-strided and transposed logits; labels with a stride; the gradient arrives."""
    torch.manual_seed(7)
    for dtype, vocab in ((torch.bfloat16, 3584), (torch.bfloat16, 515), (torch.float32, 131), (torch.float16, 96)):
        x, target = make(6, vocab, dtype, device)
        for reduction in ("mean", "none"):
            expected, got = x.clone().requires_grad_(), strided(x, layout).detach().requires_grad_()
            labels = torch.stack([target, target + 1], 1)[:, 0]
            assert labels.stride(0) == 2
            a, b = liger_cross_entropy(expected, target, reduction=reduction), liger_cross_entropy(got, labels, reduction=reduction)
            torch.testing.assert_close(a, b, rtol=2 * UNIT_ROUNDOFF[dtype], atol=0)
            upstream = strided(torch.randn(6, device=device).to(dtype), "every_other") if reduction == "none" else a.new_tensor(0.5)
            a.backward(upstream), b.backward(upstream)
            torch.testing.assert_close(expected.grad, got.grad, rtol=4 * UNIT_ROUNDOFF[dtype], atol=1e-7)


@pytest.mark.parametrize("device", devices())
def test_expanded_rows_and_upstream(device):
    """C22: rows with stride 0, and the expanded upstream gradient of a plain sum."""
    torch.manual_seed(8)
    base = torch.randn(1, 40, device=device)
    target = torch.tensor([1, 2, 3, -100], device=device)
    a, b = base.clone().requires_grad_(), base.clone().requires_grad_()
    liger_cross_entropy(a.expand(4, 40), target, reduction="none", in_place=False).sum().backward()
    torch.nn.functional.cross_entropy(b.expand(4, 40), target, reduction="none").sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("ignore_index", [-100, 0, 3, 7, -1])
def test_ignore_index(ignore_index, device):
    """Any integer, a valid class or another negative number included."""
    torch.manual_seed(9)
    x = torch.randn(12, 7, device=device)
    target = torch.randint(7, (12,), device=device)
    target[::3] = ignore_index
    check(x, target, ignore_index=ignore_index)


@pytest.mark.parametrize("device", devices())
def test_nan_and_inf(device):
    """NaN and infinities reach the loss and gradient where torch's do; masked (-inf) logits stay usable."""
    inf, nan = float("inf"), float("nan")
    for vocab in (6, 40, 1000):
        x = torch.randn(7, vocab, device=device)
        target = torch.tensor([0, 1, 2, 3, 1, 0, 0], device=device)
        x[0, 1:] = -inf
        x[1, 1] = -inf
        x[2, 0] = nan
        x[3, 5] = inf
        x[4, 1] = inf
        x[5] = -inf
        x[6, 0] = nan
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours, theirs = (f(t, target, reduction="none") for f, t in ((liger_cross_entropy, a), (torch.nn.functional.cross_entropy, b)))
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        ours.sum().backward(), theirs.sum().backward()
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)
        low = torch.full((2, vocab), -1000.0, device=device)
        torch.testing.assert_close(liger_cross_entropy(low, target[:2]), torch.nn.functional.cross_entropy(low, target[:2]))


@pytest.mark.parametrize("device", devices())
def test_magnitudes_and_module(device):
    torch.manual_seed(10)
    for scale in (1e-3, 1.0, 30.0, 300.0):
        for dtype in DTYPES:
            check(*make(5, 517, dtype, device, scale=scale))
    x, target = make(5, 9, torch.float32, device)
    module = LigerCrossEntropyLoss(label_smoothing=0.1, softcap=5.0)
    loss, _ = rows(x.double(), target, label_smoothing=0.1, softcap=5.0)
    torch.testing.assert_close(module(x, target).double(), loss.sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(LigerCrossEntropyFunction.apply(x, target, None)[0], liger_cross_entropy(x, target))
