"""fused_linear_kl_div against its fp64 definition and against eager PyTorch; helpers, errors, torch.compile."""

import inspect

import pytest
import torch

from liger_kernel.core.accuracy import LAYOUTS, assert_accurate, devices, strided
from liger_kernel.ops.fused_linear_kl_div import (
    LigerFusedLinearKLDivFunction,
    LigerFusedLinearKLDivLoss,
    fused_linear_kl_div_backward,
    fused_linear_kl_div_forward,
    liger_fused_linear_kl_div,
)
from liger_kernel.ops.fused_linear_kl_div.cases import DTYPES, REDUCTIONS, SHAPES, bounds
from liger_kernel.ops.fused_linear_kl_div.ref import eager, reference

on_devices = pytest.mark.parametrize("device", devices())


def make(rows, hidden, vocab, dtype, device="cpu"):
    x = torch.randn(rows, hidden, device=device).to(dtype)
    weight = (torch.randn(vocab, hidden, device=device) * 2 / hidden**0.5).to(dtype)
    p = torch.softmax(torch.randn(rows, vocab, device=device) * 3, -1)
    if vocab > 2:
        p[:, 1] = 0
    labels = torch.randint(3, (rows,), device=device)
    labels[1::3] = -100
    return x, weight, p.to(dtype), labels


def gradients(function, x, weight, p, labels=None, upstream=1.0, **options):
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    loss = function(x, weight, p, labels, **options)
    loss.backward(torch.full_like(loss, upstream))
    return loss.detach(), x.grad, weight.grad


def check(tensors, against_eager=False, upstream=1.0, **options):
    ours = gradients(liger_fused_linear_kl_div, *tensors, upstream=upstream, **options)
    truth = gradients(reference, *(t.double() for t in tensors[:3]), tensors[3], upstream=upstream, **options)
    theirs = gradients(eager, *tensors, upstream=upstream, **options) if against_eager else (None,) * 3
    b = bounds(*tensors, **options)
    for what, got, want, bound, other in zip(("loss", "dx", "dw"), ours, truth, (b.loss, abs(upstream) * b.dx(), abs(upstream) * b.dw()),
                                             theirs, strict=True):
        assert_accurate(got, want, bound, other, what)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_reductions(shape, reduction, dtype, device):
    torch.manual_seed(0)
    x, weight, p, labels = make(*shape, dtype, device)
    check((x, weight, p, labels), reduction=reduction, upstream=-3.0, temperature=1.5)
    check((x, weight, p, None), reduction=reduction, against_eager=shape[0] == 300)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities_that_do_not_sum_to_one(dtype, device):
    torch.manual_seed(1)
    x, weight, p, labels = make(40, 16, 90, dtype, device)
    check((x, weight, (p.float() * 2.5).to(dtype), labels))
    check((x, weight, p.float(), labels), eps=1e-3)
    check((x, weight, torch.zeros_like(p), labels))


@on_devices
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_label_ignored_and_zero_rows(reduction, device):
    x, weight, p, labels = make(6, 16, 20, torch.float32, device)
    for data in ((x, weight, p, torch.full_like(labels, -100)), (x[:0], weight, p[:0], labels[:0]), (x[:0], weight, p[:0], None)):
        for t in gradients(liger_fused_linear_kl_div, *data, reduction=reduction):
            assert torch.equal(t, torch.zeros_like(t))


@on_devices
def test_layouts(device):
    tensors = make(30, 16, 70, torch.float32, device)
    want = gradients(liger_fused_linear_kl_div, *tensors)
    for layout in LAYOUTS:
        x, weight, p = (strided(t, layout).detach() for t in tensors[:3])
        x.requires_grad_(), weight.requires_grad_()
        loss = liger_fused_linear_kl_div(x, weight, p, tensors[3])
        loss.backward()
        for got, expected in zip((loss, x.grad, weight.grad), want, strict=True):
            torch.testing.assert_close(got, expected)


@on_devices
def test_frozen_and_second_backward(device):
    x, weight, p, labels = make(9, 16, 33, torch.float32, device)
    full = gradients(liger_fused_linear_kl_div, x, weight, p, labels)[1:]
    for frozen in (0, 1, None):
        tensors = [t.clone().requires_grad_(i != frozen) for i, t in enumerate((x, weight))]
        loss = liger_fused_linear_kl_div(*tensors, p.clone().requires_grad_(), labels)
        loss.backward(retain_graph=True)
        loss.backward(torch.tensor(3.0, device=device))
        for i, (t, g) in enumerate(zip(tensors, full, strict=True)):
            assert t.grad is None if i == frozen else torch.allclose(t.grad, 4 * g, rtol=1e-5, atol=1e-6)
        with pytest.raises(RuntimeError, match="second time|modified by an inplace"):
            loss.backward()


@on_devices
def test_module_helpers_signature_and_errors(device):
    x, weight, p, labels = make(9, 16, 33, torch.float32, device)
    names = ["student_input", "student_weight", "target", "shift_labels", "reduction", "ignore_index", "temperature", "eps", "accum_dtype"]
    assert list(inspect.signature(liger_fused_linear_kl_div).parameters) == names
    want = gradients(liger_fused_linear_kl_div, x, weight, p, labels, reduction="mean", temperature=2.0)
    torch.testing.assert_close(LigerFusedLinearKLDivLoss("mean", temperature=2.0)(x, weight, p, labels), want[0])
    x.requires_grad_(), weight.requires_grad_()
    helper = fused_linear_kl_div_forward(x, weight, p, labels, "mean", -100, True, 2.0, 1e-10, torch.float32)
    for a, b in zip(helper, want, strict=True):
        torch.testing.assert_close(a.detach(), b)
    scaled = fused_linear_kl_div_backward(torch.tensor(2.0, device=device), *(t.clone() for t in helper[1:]))
    torch.testing.assert_close(scaled[0], 2 * want[1])
    assert fused_linear_kl_div_forward(x, weight.detach(), p, labels, "mean", -100, True, 2.0, 1e-10)[2] is None
    assert issubclass(LigerFusedLinearKLDivFunction, torch.autograd.Function)
    loss = LigerFusedLinearKLDivLoss("none")  # forward says so, not the constructor
    with pytest.raises(ValueError, match="reduction is 'none'"):
        loss(x, weight, p)
    for call in (lambda: LigerFusedLinearKLDivLoss(temperature=0), lambda: liger_fused_linear_kl_div(x, weight, p, temperature=0)):
        with pytest.raises(AssertionError, match="temperature"):
            call()
    with pytest.raises(AssertionError, match="shift_labels"):
        liger_fused_linear_kl_div(x, weight, p, labels[:3])
    with pytest.raises(ValueError, match="32 probabilities a row"):
        liger_fused_linear_kl_div(x, weight, p[:, :32])
    for wrong in ((x.double(), weight.double(), p), (x.long(), weight, p), (x, weight, p.long())):
        with pytest.raises(RuntimeError, match="fused_linear_kl_div: takes fp32, bf16 and fp16"):
            liger_fused_linear_kl_div(*wrong)


@on_devices
def test_compile(device):
    x, weight, p, labels = make(9, 16, 33, torch.float32, device)
    compiled = torch.compile(liger_fused_linear_kl_div, fullgraph=True)
    results = [gradients(f, x, weight, p, labels) for f in (compiled, liger_fused_linear_kl_div)]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
