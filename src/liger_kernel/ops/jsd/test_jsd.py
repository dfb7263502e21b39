"""jsd against its fp64 definition and against eager PyTorch, and inside autograd and torch.compile."""

import inspect

import pytest
import torch

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.jsd import LigerJSD, LigerJSDFunction, jsd_backward, jsd_forward, liger_jsd
from liger_kernel.ops.jsd.cases import BETAS, DTYPES, SHAPES, bounds
from liger_kernel.ops.jsd.ref import eager, reference

on_devices = pytest.mark.parametrize("device", devices())


def make(rows, vocab, dtype, device="cpu", scale=1.0):
    x, y = (torch.log_softmax(torch.randn(rows, vocab, device=device) * scale, -1).to(dtype) for _ in range(2))
    target = torch.randint(5, (rows,), device=device)
    target[1::3] = -100
    return x, y, target


def gradients(function, x, y, target=None, beta=0.5, upstream=1.0, **options):
    x = x.detach().clone().requires_grad_()
    loss = function(x, y, target, beta, **options)
    loss.backward(torch.full_like(loss, upstream))
    return loss.detach(), x.grad


def check(x, y, target, beta, upstream=1.0, against_eager=False):
    ours = gradients(liger_jsd, x, y, target, beta, upstream)
    truth = gradients(reference, x.double(), y.double(), target, beta, upstream)
    theirs = gradients(eager, x, y, target, beta, upstream) if against_eager else (None, None)
    loss, grad, rounding = bounds(x, y, target, beta, upstream=upstream)
    assert ours[0].dtype == ours[1].dtype == x.dtype
    assert_accurate(ours[0], truth[0], loss, theirs[0], "loss")
    assert_accurate(ours[1], truth[1], grad + rounding * truth[1].abs(), theirs[1], "dx")
    return ours


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, beta, dtype, device):
    torch.manual_seed(0)
    x, y, target = make(*shape, dtype, device)
    check(x, y, None, beta)
    check(x, y, target, beta, upstream=-3.0, against_eager=shape[1] > 1)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_wide_range(beta, dtype, device):
    """C36: log-probabilities down to -200 and beyond give a finite loss, not below 0, and a finite gradient."""
    torch.manual_seed(1)
    x, y, target = make(40, 515, dtype, device, scale=100.0)
    loss, dx = check(x, y, target, beta, against_eager=True)
    assert bool(loss.isfinite()) and float(loss) >= 0 and bool(dx.isfinite().all())


@on_devices
@pytest.mark.parametrize("beta", BETAS)
def test_equal_and_nearly_equal(beta, device):
    """No noise above the size of the rounding of 1, where teacher and student agree."""
    torch.manual_seed(2)
    x, _, _ = make(9, 4097, torch.float32, device)
    assert abs(float(liger_jsd(x, x, None, beta))) <= (0 if 0 < beta < 1 else 1e-7)
    y = torch.log_softmax(x + 1e-3 * torch.randn_like(x), -1)
    truth = float(reference(x.double(), y.double(), None, beta))
    assert abs(float(liger_jsd(x, y, None, beta)) - truth) <= 2 * 2.0**-24


@on_devices
@pytest.mark.parametrize("beta", BETAS)
def test_probability_zero(beta, device):
    """0 log 0 = 0; where a divergence is infinite it is, and NaN stays NaN."""
    inf = float("inf")
    x = torch.tensor([[0.0, -inf, -inf], [-0.7, -0.7, -inf], [-1.0, -1.1, -1.2]], device=device).log_softmax(-1)
    y = torch.tensor([[0.0, -inf, -inf], [-0.7, -0.7, -inf], [-0.2, -0.3, -inf]], device=device).log_softmax(-1)
    loss, dx = gradients(liger_jsd, x, y, None, beta)
    truth, dx64 = gradients(reference, x.double(), y.double(), None, beta)
    assert not dx[:2].isnan().any() and not loss.isnan()
    torch.testing.assert_close(loss, truth.float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(dx[:2], dx64[:2].float(), rtol=1e-6, atol=1e-7)
    x[0, 0] = float("nan")
    assert liger_jsd(x, y, None, beta).isnan()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_label_ignored_and_zero_rows(dtype, device):
    x, y, target = make(6, 40, dtype, device)
    x[2] = float("nan")
    loss, dx = gradients(liger_jsd, x, y, torch.full_like(target, -100))
    assert float(loss) == 0 and torch.equal(dx, torch.zeros_like(dx))
    for labels_given in (None, target[:0]):
        loss, dx = gradients(liger_jsd, x[:0], y[:0], labels_given)
        assert float(loss) == 0 and dx.shape == (0, 40)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(dtype, device):
    """Sliced, transposed, misaligned and expanded inputs; every label layout."""
    torch.manual_seed(3)
    x, y, target = make(12, 70, dtype, device)
    want = gradients(liger_jsd, x, y, target)
    for first in LAYOUTS:
        for second in LAYOUTS:
            a = strided(x, first).detach().requires_grad_()
            loss = liger_jsd(a, strided(y, second), strided(target, "every_other"))
            loss.backward()
            assert torch.equal(loss, want[0])
            torch.testing.assert_close(a.grad, want[1], rtol=4 * UNIT_ROUNDOFF[dtype], atol=1e-9)
    one = y[:1].expand(12, -1)
    torch.testing.assert_close(liger_jsd(x, one), liger_jsd(x, one.contiguous()))


@on_devices
def test_mixed_dtypes(device):
    """A bf16 student against an fp32 teacher: computed in fp32, the gradient in the student's dtype."""
    x, y, target = make(8, 90, torch.float32, device)
    x = x.bfloat16()
    loss, dx = gradients(liger_jsd, x, y, target)
    truth, dx64 = gradients(reference, x.double(), y.double(), target)
    assert loss.dtype == dx.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), truth, rtol=2**-8, atol=1e-9)
    torch.testing.assert_close(dx.double(), dx64, rtol=2**-7, atol=1e-9)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_backward(dtype, device):
    """C87: upstream 1, then 3; the sum is 4 times the first, and a third one says that the graph is gone."""
    x, y, target = make(9, 33, dtype, device)
    x.requires_grad_()
    loss = liger_jsd(x, y, target)
    loss.backward(torch.ones_like(loss), retain_graph=True)
    first = x.grad.clone()
    loss.backward(torch.full_like(loss, 3))
    torch.testing.assert_close(x.grad, 4 * first, rtol=8 * UNIT_ROUNDOFF[dtype], atol=1e-7)
    with pytest.raises(RuntimeError, match="second time|modified by an inplace"):
        loss.backward()


@on_devices
def test_gradients_only_where_required(device):
    x, y, _ = make(5, 33, torch.float32, device)
    assert not liger_jsd(x, y).requires_grad
    y.requires_grad_()
    assert not liger_jsd(x, y).requires_grad  # none for the teacher
    x.requires_grad_()
    with torch.no_grad():
        assert not liger_jsd(x, y).requires_grad
    liger_jsd(x, y).backward()
    assert y.grad is None and x.grad is not None


@on_devices
def test_fp16_gradients_of_a_mean(device):
    """Under a loss scaler: 1 / n is multiplied in after the upstream gradient, so that nothing underflows."""
    x, y, _ = make(3000, 300, torch.float16, device)
    _, dx = gradients(liger_jsd, x, y, None, 0.5, 65504.0)
    _, dx64 = gradients(reference, x.double(), y.double(), None, 0.5, 65504.0)
    assert (dx.double() - dx64).norm() <= 2**-10 * dx64.norm()


@on_devices
def test_module_helpers_and_errors(device):
    x, y, target = make(6, 33, torch.float32, device)
    assert list(inspect.signature(liger_jsd).parameters) == ["input", "target", "shift_labels", "beta", "ignore_index"]
    assert torch.equal(LigerJSD(0.3, 2)(x, y, target), liger_jsd(x, y, target, 0.3, 2))
    assert torch.equal(LigerJSDFunction.apply(x, y, target, 0.3, -100, "nvidia-triton", "default"), liger_jsd(x, y, target, 0.3))
    loss, dx = jsd_forward(x, y, target, 0.3, -100, True)
    torch.testing.assert_close(jsd_backward(dx.clone(), torch.tensor(3.0, device=device)), gradients(liger_jsd, x, y, target, 0.3, 3.0)[1])
    torch.testing.assert_close(loss, liger_jsd(x, y, target, 0.3))
    assert torch.equal(jsd_forward(x, y, target, 0.3, -100, False)[0], liger_jsd(x, y, None, 0.3))
    with pytest.raises(AssertionError, match=r"shift_labels has shape \(5,\)"):
        liger_jsd(x, y, target[:5])
    with pytest.raises(ValueError, match="beta is 1.5"):
        liger_jsd(x, y, None, 1.5)
    with pytest.raises(ValueError, match="beta is -1"):
        LigerJSD(-1)
    with pytest.raises(ValueError, match="equal"):
        liger_jsd(x, y[:, :5])
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        liger_jsd(x.double(), y.double())
    for wrong in (x.long(), x > 0):
        with pytest.raises(CORE_ERROR, match="jsd: takes fp32, bf16 and fp16"):
            liger_jsd(wrong, y)
    with pytest.raises(RuntimeError, match="class indices"):
        liger_jsd(x, y, target.float())
    with pytest.raises(ValueError, match="jsd_impl"):
        LigerJSDFunction.apply(x, y, None, 0.5, -100, "fast")
    with pytest.raises(ValueError, match="jsd_mode"):
        LigerJSDFunction.apply(x, y, None, 0.5, -100, None, "fast")
    assert liger_jsd(x, y, target - 50).isfinite()  # labels only say which rows count


@on_devices
def test_second_derivative_is_refused(device):
    x, y, _ = make(4, 9, torch.float32, device)
    x.requires_grad_()
    (g,) = torch.autograd.grad(liger_jsd(x, y), x, create_graph=True)
    with pytest.raises(RuntimeError, match="jsd"):
        torch.autograd.grad(g.sum(), x)


@on_devices
def test_opcheck(device):
    x, y, target = make(5, 33, torch.bfloat16, device)
    stats = labels.ask(target, 33).device
    for want in (False, True):
        torch.library.opcheck(torch.ops.liger_kernel.jsd_forward, (x, y, target, stats, -100, 0.5, 1.0, want),
                              test_utils=("test_schema", "test_faketensor"))


@on_devices
def test_compile(device):
    def step(x, y, target):
        return liger_jsd(torch.log_softmax(x, -1), torch.log_softmax(y, -1), target, 0.3) * 2

    x, y, target = torch.randn(7, 40, device=device), torch.randn(7, 40, device=device), torch.randint(3, (7,), device=device)
    compiled = torch.compile(step, fullgraph=True)
    results = []
    for function in (step, compiled):
        a = x.clone().requires_grad_()
        function(a, y, target).backward()
        results.append(a.grad)
    torch.testing.assert_close(*results)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, y, target), step(x, y, target))


def test_every_cpu_variant(monkeypatch):
    torch.manual_seed(4)
    x, y, target = make(9, 1003, torch.bfloat16)
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_JSD", variant)
        try:
            for beta in BETAS:
                check(x, y, target, beta)
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
