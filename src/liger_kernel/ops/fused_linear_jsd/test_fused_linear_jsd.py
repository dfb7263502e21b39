"""The distillation losses of two heads against their fp64 definition and against eager PyTorch: values and gradients of every option."""

import pytest
import torch

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.fused_linear_jsd import distill, liger_fused_linear_jsd
from liger_kernel.ops.fused_linear_jsd.cases import DTYPES, OPTIONS, SHAPES, Bounds
from liger_kernel.ops.fused_linear_jsd.ref import eager, reference
from liger_kernel.ops.jsd.cases import BETAS

on_devices = pytest.mark.parametrize("device", devices())


def make(rows, hidden, teacher_hidden, vocab, dtype, device="cpu", ignored=0.25, teacher_vocab=0, scale=2.0):
    """(x, weight, teacher, teacher_weight, target)"""
    x, t = (torch.randn(rows, h, device=device).to(dtype) for h in (hidden, teacher_hidden))
    weight, other = ((torch.randn(v, h, device=device) * scale / h**0.5).to(dtype)
                     for v, h in ((vocab, hidden), (vocab + teacher_vocab, teacher_hidden)))
    target = torch.randint(vocab, (rows,), device=device)
    if rows > 2:
        target[torch.rand(rows, device=device) < ignored] = -100
        target[0] = 0
    return x, weight, t, other, target


def gradients(function, x, weight, teacher, teacher_weight, target, bias=None, teacher_bias=None, upstream=None, **options):
    """(loss, dx, dw, db) as autograd gives them."""
    tensors = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    biases = () if bias is None else (tensors[2], teacher_bias)
    loss = function(*tensors[:2], teacher, teacher_weight, target, *biases, **options)
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss.backward(None if upstream is None else torch.full_like(loss, upstream))
    return loss.detach(), *(None if t is None else t.grad for t in tensors)


def check(tensors, against_eager=False, upstream=None, logits_memory=0, **options):
    x, weight, teacher, teacher_weight, target = tensors
    options = dict(options)
    options.pop("teacher_vocab", None)
    if options.pop("bias", False):
        options["bias"] = torch.randn(weight.shape[0], device=x.device).to(x.dtype)
        options["teacher_bias"] = torch.randn(teacher_weight.shape[0], device=x.device).to(x.dtype)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    ours = gradients(distill, *tensors, upstream=upstream, logits_memory=logits_memory, **options)
    truth = gradients(reference, *(None if t is None else t.double() for t in tensors[:4]), target, upstream=upstream, **wide)
    theirs = gradients(eager, *tensors, upstream=upstream, **options) if against_eager else (None,) * 4
    bounds = Bounds(*tensors, **options)
    size = 1.0 if upstream is None else abs(upstream)
    assert ours[0].dtype == torch.float32
    for what, got, want, bound, other in zip(
            ("loss", "dx", "dw", "db"), ours, truth, (bounds.loss, size * bounds.dx(), size * bounds.dw(), size * bounds.db()), theirs,
            strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert_accurate(got, want, bound, other, what)
    return ours


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, beta, dtype, device):
    torch.manual_seed(0)
    check(make(*shape, dtype, device), beta=beta)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_no_less_accurate_than_eager(beta, dtype, device):
    torch.manual_seed(1)
    for memory in (0, 1):
        check(make(700, 96, 64, 515, dtype, device), against_eager=True, beta=beta, temperature=2.0, logits_memory=memory)


@on_devices
@pytest.mark.parametrize("chunked", [False, True], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, dtype, chunked, device):
    """Every option has the numbers of its definition, in one chunk and in several, with upstream gradients other than one."""
    torch.manual_seed(2)
    rows = (1300 if device != "cpu" else 210) if chunked else 48
    options = OPTIONS[name]
    x, weight, t, other, target = make(rows, 40, 24, 83, dtype, device, teacher_vocab=options.get("teacher_vocab", 0))
    if options.get("divergence") == "probabilities":
        t, other = torch.softmax(torch.randn(rows, 83, device=device) * 3, -1).to(dtype), None
        t[:, 5] = 0
    target[target == -100] = options.get("ignore_index", -100)
    check((x, weight, t, other, target), upstream=-3.0, logits_memory=int(chunked), **options)


@on_devices
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_range(dtype, beta, device):
    """C36: logits of scale 100: finite, not below 0, finite gradients."""
    torch.manual_seed(3)
    loss, dx, dw, _ = check(make(40, 32, 32, 515, dtype, device, scale=100.0), beta=beta)
    assert bool(loss.isfinite()) and float(loss) >= 0 and bool(dx.isfinite().all()) and bool(dw.isfinite().all())


@on_devices
@pytest.mark.parametrize("divergence", ["jsd", "cosine"])
def test_student_equal_to_teacher(divergence, device):
    torch.manual_seed(4)
    x, weight, _, _, target = make(20, 32, 32, 515, torch.float32, device)
    loss, dx, dw, _ = gradients(distill, x, weight, x, weight, target, divergence=divergence)
    assert 0 <= float(loss) < 1e-6 and float(dx.abs().max()) < 1e-6 and float(dw.abs().max()) < 1e-6


@on_devices
@pytest.mark.parametrize("vocab", [515, 4104])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_and_far_from_zero(dtype, vocab, device):
    """Logits of 10^5: a log-probability keeps the precision of its distance to the largest logit."""
    torch.manual_seed(4)
    x, weight, _, _, target = make(20, 32, 32, vocab, dtype, device, scale=1e5)
    loss, dx, dw, _ = gradients(distill, x, weight, x, weight, target, beta=0.5)
    assert 0 <= float(loss) < 1e-6 and float(dx.abs().max()) < 1e-6 * 1e5 and float(dw.abs().max()) < 1e-6


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hard_weight", [0.0, 0.5])
def test_every_label_ignored(hard_weight, dtype, device):
    """C5: loss and gradients 0, and nothing of the ignored rows is read."""
    x, weight, t, other, target = make(6, 16, 16, 11, dtype, device)
    x[2], t[3] = float("nan"), float("nan")
    for divergence in ("jsd", "cosine"):
        for result in gradients(distill, x, weight, t, other, torch.full_like(target, -100), torch.zeros_like(weight[:, 0]),
                                torch.zeros_like(other[:, 0]), divergence=divergence, hard_weight=hard_weight):
            assert torch.equal(result, torch.zeros_like(result))


@on_devices
def test_zero_rows(device):
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, t, other, target = make(0, 16, 8, 9, dtype, device)
        for labels in (None, target):
            loss, dx, dw, _ = gradients(distill, x, weight, t, other, labels)
            assert float(loss) == 0 and dx.shape == (0, 16) and torch.equal(dw, torch.zeros_like(dw))


@on_devices
@pytest.mark.parametrize("memory", [0, 1])
def test_long_weight_gradient(memory, device):
    """C17: dW of bf16 over many chunks is summed in fp32 and rounded once."""
    torch.manual_seed(5)
    tensors = make(2048, 64, 64, 2048, torch.bfloat16, device, ignored=0.0)
    _, dx, dw, _ = gradients(distill, *tensors, logits_memory=memory)
    _, dx64, dw64, _ = gradients(reference, *(t.double() for t in tensors[:4]), tensors[4])
    u = UNIT_ROUNDOFF[torch.bfloat16]
    assert (dw.double() - dw64).norm() <= 2 * u * dw64.norm()
    assert (dx.double() - dx64).norm() <= 4 * u * dx64.norm()


@on_devices
def test_wide_vocabulary(device):
    """Beyond the registers and shared memory of a block, and of a cluster."""
    torch.manual_seed(6)
    for vocab, dtype in ((151936, torch.bfloat16), (262147, torch.float32)):
        check(make(5, 16, 8, vocab, dtype, device), beta=0.5, hard_weight=0.5, temperature=2.0)


@on_devices
@pytest.mark.parametrize("dtype,hidden", [(torch.float32, 33), (torch.bfloat16, 64)], ids=str)
def test_layouts(dtype, hidden, device):
    """Sliced, transposed and misaligned hidden states, weights, labels and probabilities; 3-D slices as trainers pass them."""
    torch.manual_seed(7)
    tensors = make(50, hidden, hidden, 70, dtype, device)
    target = tensors[4]
    want = gradients(liger_fused_linear_jsd, *tensors)
    p = torch.rand(50, 70, device=device).to(dtype)
    want_p = gradients(distill, *tensors[:2], p, None, target, divergence="probabilities")
    for layout in LAYOUTS:
        x, weight, t, other = (strided(a, layout).detach() for a in tensors[:4])
        x.requires_grad_(), weight.requires_grad_()
        loss = liger_fused_linear_jsd(x, weight, t, other, strided(target, "every_other"))
        loss.backward()
        for got, expected in zip((loss, x.grad, weight.grad), want, strict=False):
            torch.testing.assert_close(got, expected, rtol=64 * UNIT_ROUNDOFF[dtype], atol=UNIT_ROUNDOFF[dtype])
        got = gradients(distill, *tensors[:2], strided(p, layout), None, target, divergence="probabilities")
        for a, b in zip(got, want_p, strict=True):
            assert a is b is None or torch.allclose(a, b, rtol=64 * UNIT_ROUNDOFF[dtype], atol=UNIT_ROUNDOFF[dtype])
    hidden_states, weight = torch.randn(4, 9, 16, device=device), torch.randn(70, 16, device=device)
    other, labels = torch.randn(70, 16, device=device), torch.randint(70, (4, 8), device=device)
    cut = hidden_states[:, :-1]
    loss, dx, dw, _ = gradients(distill, cut, weight, cut, other, labels)
    flat = gradients(distill, cut.reshape(-1, 16), weight, cut.reshape(-1, 16), other, labels.flatten())
    assert dx.shape == cut.shape and torch.equal(loss, flat[0]) and torch.equal(dx.flatten(0, 1), flat[1]) and torch.equal(dw, flat[2])


@on_devices
@pytest.mark.parametrize("p_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities_of_another_dtype(dtype, p_dtype, device):
    torch.manual_seed(8)
    x, weight, _, _, target = make(30, 16, 16, 67, dtype, device)
    check((x, weight, torch.softmax(torch.randn(30, 67, device=device), -1).to(p_dtype), None, target), divergence="probabilities")


@on_devices
def test_fp16_mean_under_a_loss_scaler(device):
    """The gradients of a mean over many rows are too small for fp16 before the scaler's factor arrives; they are not lost."""
    torch.manual_seed(9)
    tensors = make(2000, 64, 64, 1000, torch.float16, device, ignored=0.0, scale=0.5)
    _, dx, dw, _ = gradients(distill, *tensors, upstream=65536.0)
    _, dx64, dw64, _ = gradients(reference, *(t.double() for t in tensors[:4]), tensors[4], upstream=65536.0)
    assert (dx.double() - dx64).norm() <= 8 * UNIT_ROUNDOFF[torch.float16] * dx64.norm()
    assert (dw.double() - dw64).norm() <= 8 * UNIT_ROUNDOFF[torch.float16] * dw64.norm()


def test_every_cpu_variant(monkeypatch):
    """C92: without a feature (AVX-512, bf16 products) the other paths give the same within their rounding; an unknown name is an error."""
    torch.manual_seed(10)
    tensors = make(300, 40, 24, 333, torch.bfloat16)
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_FUSED_LINEAR_JSD", variant)
        try:
            check(tensors, bias=True, logits_memory=1, hard_weight=0.5, temperature=2.0)
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
    monkeypatch.setenv("LIGER_FUSED_LINEAR_JSD", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        distill(*tensors)
