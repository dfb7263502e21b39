"""fused_linear_log_probs against its fp64 definition and against eager PyTorch: values and gradients of every result and option."""

import pytest
import torch

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.fused_linear_log_probs import fused_linear_log_probs, log_probs_and_gradients
from liger_kernel.ops.fused_linear_log_probs.cases import DTYPES, OPTIONS, SHAPES, Bounds
from liger_kernel.ops.fused_linear_log_probs.ref import eager, reference

RESULTS = ("logp", "entropy", "lse")
UPSTREAM = {"logp": (True, False, False), "entropy": (False, True, False), "lse": (False, False, True), "all": (True, True, True)}


def make(rows, hidden, vocab, dtype, device="cpu", ignored=0.25):
    x = torch.randn(rows, hidden, device=device).to(dtype)
    weight = (torch.randn(vocab, hidden, device=device) * 2 / hidden**0.5).to(dtype)
    target = torch.randint(vocab, (rows,), device=device)
    if rows > 2:
        target[torch.rand(rows, device=device) < ignored] = -100
        target[0] = 0
    return x, weight, target


def random_upstream(rows, device, which="all"):
    return tuple(torch.randn(rows, device=device) if w else None for w in UPSTREAM[which])


def ours(x, weight, target, bias=None, upstream=(None, None, None), **options):
    """((logp, entropy, lse), (dx, dw, db)) by autograd."""
    tensors = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    out = fused_linear_log_probs(tensors[0], tensors[1], target, tensors[2], return_entropy=True, return_lse=True, **options)
    return _differentiate((out.logp, out.entropy, out.lse), tensors, upstream)


def one_pass(x, weight, target, bias=None, upstream=(None, None, None), **options):
    calls = []

    def coefficients(begin, end, chunk):
        calls.append((begin, end))
        assert chunk.logp.shape == chunk.entropy.shape == chunk.lse.shape == (end - begin,)
        return tuple(None if g is None else g[begin:end] for g in upstream)

    out, *grads = log_probs_and_gradients(x, weight, target, coefficients, bias, want_entropy=True, want_lse=True, want_dx=True,
                                          want_dw=True, want_db=bias is not None, **options)
    ends = [end for _, end in calls]
    assert [begin for begin, _ in calls] == [0, *ends][:-1] and ends[-1] == target.numel()
    return (out.logp, out.entropy, out.lse), tuple(grads)


def truth(x, weight, target, bias=None, upstream=(None, None, None), **options):
    tensors = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    results = reference(tensors[0], tensors[1], target, tensors[2], **options)
    return _differentiate(results, tensors, [None if g is None else g.double() for g in upstream])


def _differentiate(results, tensors, upstream):
    pairs = [(r, g) for r, g in zip(results, upstream, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
    return tuple(r.detach() for r in results), tuple(None if t is None else t.grad for t in tensors)


def check(function, x, weight, target, logits_memory=0, against=None, **options):
    results, grads = function(x, weight, target, logits_memory=logits_memory, **options)
    true_results, true_grads = truth(x, weight, target, **options)
    bounds = Bounds(x, weight, target, **options)
    other_results, other_grads = against or ((None,) * 3, (None,) * 3)
    for what, got, want, other in zip(RESULTS, results, true_results, other_results, strict=True):
        assert got.dtype == torch.float32
        assert_accurate(got, want, getattr(bounds, what), other, what)
    allowed = (bounds.dx(), bounds.dw(), bounds.db())
    for what, got, want, bound, other in zip(("dx", "dw", "db"), grads, true_grads, allowed, other_grads, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert_accurate(got, want, bound, other, what)
    return results, grads


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", [ours, one_pass])
def test_shapes(function, shape, dtype, device):
    """C13: one entry, vocabularies off every tile, 129920 and odd ones included; log-probabilities are never positive."""
    torch.manual_seed(0)
    x, weight, target = make(*shape, dtype, device)
    results, _ = check(function, x, weight, target, upstream=random_upstream(shape[0], device))
    assert bool((results[0] <= 0).all()) and bool((results[1] >= 0).all())


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("memory", [0, 1], ids=["default", "small tiles and chunks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", UPSTREAM)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, which, dtype, memory, device):
    """Every option and every upstream gradient, alone and together, several tiles and several chunks."""
    torch.manual_seed(1)
    rows, vocab = (150, 5003) if memory else (40, 83)
    x, weight, target = make(rows, 40, vocab, dtype, device)
    options = dict(OPTIONS[name])
    target[target == -100] = options.get("ignore_index", -100)
    if options.pop("bias", False):
        options["bias"] = torch.randn(vocab, device=device).to(dtype)
    options["upstream"] = random_upstream(rows, device, which)
    check(ours, x, weight, target, memory, **options)
    check(one_pass, x, weight, target, memory, **options)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_less_accurate_than_eager(dtype, device):
    torch.manual_seed(2)
    x, weight, target = make(700, 96, 515, dtype, device, ignored=0.0)
    upstream = random_upstream(700, device)
    tensors = [t.clone().requires_grad_() for t in (x, weight)]
    logp, entropy = eager(*tensors, target, want_entropy=True)
    lse = torch.nn.functional.linear(*tensors).float().logsumexp(-1)
    theirs = _differentiate((logp, entropy, lse), [*tensors, None], upstream)
    check(ours, x, weight, target, upstream=upstream, against=theirs)
    check(one_pass, x, weight, target, 1, upstream=upstream, against=theirs)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("gap", [8.0, 20.0, 25.0])
def test_confident_rows(gap, device):
    """A near-certain token's log-probability, entropy and gradients keep their relative precision (1 - p below fp32's resolution)."""
    z = torch.linspace(-1, 1, 3001, dtype=torch.float64)[None].repeat(4, 1)
    for row, column in enumerate((0, 1500, 3000, 2048)):
        z[row, column] = gap
    z = z.float()
    target = torch.tensor([0, 1500, 3000, 7], device=device)  # the last is not the certain one
    x, weight = z.to(device), torch.eye(3001, device=device)
    for which in ("logp", "entropy"):
        upstream = tuple(None if not w else torch.ones(4, device=device) for w in UPSTREAM[which])
        for function in (ours, one_pass):
            results, (dz, _, _) = function(x, weight, target, upstream=upstream)
            true, (dz64, _, _) = truth(x, weight, target, upstream=upstream)
            for got, want in zip(results, true, strict=True):
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)
            allowed = 1e-5 * dz64.abs() + 1e-5 * torch.softmax(z.double().to(device), -1)
            # The certain column's own gradient, which is the sum of the others, to relative precision.
            allowed[torch.arange(3), target[:3]] = 2e-5 * dz64[torch.arange(3), target[:3]].abs()
            assert bool(((dz.double() - dz64).abs() <= allowed).all())


@pytest.mark.parametrize("device", devices())
def test_infinities_and_nan(device):
    """Row by row what log_softmax gives; other rows are not touched."""
    weight = torch.eye(70, device=device)
    x = torch.randn(7, 70, device=device)
    target = torch.tensor([3, 3, 3, 3, 3, 69, 3], device=device)
    infinity = float("inf")
    z = x.clone()
    z[0, 5], z[1, 3], z[2, 9], z[3, :], z[5, :69] = float("nan"), float("nan"), infinity, -infinity, -infinity
    bias = torch.zeros(70, device=device)
    # Infinite hidden states would make NaN of every product with 0, so rows are checked one by one with the row as bias.
    for row in range(7):
        out = fused_linear_log_probs(torch.zeros_like(x[:1]), weight, target[row : row + 1], z[row] + bias, return_entropy=True)
        want = torch.log_softmax(z[row].double(), -1)
        torch.testing.assert_close(out.logp[0].double(), want[target[row]], rtol=1e-5, atol=1e-6, equal_nan=True)
        if row == 5:
            assert float(out.entropy) == 0  # the definition has 0 log 0 = 0
        else:
            torch.testing.assert_close(out.entropy[0].double(), -(want.exp() * want).sum(), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_predictions(dtype, device):
    """argmax, the first of equals; hits; -1 and False at ignored positions; across the borders of tiles."""
    torch.manual_seed(3)
    x, weight, target = make(130, 32, 9001, dtype, device)
    x[5] = 0  # a row of equal logits
    target[5], target[6] = 0, 8000
    weight[8000] = 30 * x[6]
    weight[20] = weight[8000]  # a tie
    z = torch.nn.functional.linear(x, weight)
    for memory in (0, 1):
        out = fused_linear_log_probs(x, weight, target, return_predicted_tokens=True, return_hits=True, logits_memory=memory)
        valid = target != -100
        best = out.predicted_tokens[valid]
        assert out.predicted_tokens.dtype == torch.int64 and out.hits.dtype == torch.bool
        assert bool((out.predicted_tokens[~valid] == -1).all()) and not bool(out.hits[~valid].any())
        largest = z[valid].float().amax(-1)
        assert bool((z[valid].gather(-1, best[:, None]).squeeze(-1).float() >= largest - 4 * UNIT_ROUNDOFF[dtype] * largest.abs()).all())
        assert out.predicted_tokens[5] == 0 and bool(out.hits[5]) and out.predicted_tokens[6] == 20
        assert torch.equal(out.hits, (out.predicted_tokens == target) & valid)
        again, *_ = log_probs_and_gradients(x, weight, target, lambda b, e, c: None, want_prediction=True, logits_memory=memory)
        assert torch.equal(again.predicted_tokens[6:7], out.predicted_tokens[6:7])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [ours, one_pass])
def test_every_label_ignored(function, dtype, device):
    """C5: results and gradients 0, and nothing of the ignored rows is read."""
    x, weight, _ = make(6, 16, 11, dtype, device)
    x[2] = float("nan")
    target = torch.full((6,), -100, device=device)
    bias = torch.randn(11, device=device).to(dtype)
    results, grads = function(x, weight, target, bias, random_upstream(6, device))
    for t in (*results, *grads):
        assert torch.equal(t, torch.zeros_like(t))


@pytest.mark.parametrize("device", devices())
def test_zero_rows(device):
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.zeros(0, 16, device=device, dtype=dtype), torch.ones(9, 16, device=device, dtype=dtype)
        target = torch.zeros(0, device=device, dtype=torch.int64)
        empty = torch.zeros(0, device=device)
        results, (dx, dw, _) = ours(x, weight, target, upstream=(empty, None, None))
        assert all(r.shape == (0,) for r in results) and dx.shape == (0, 16) and torch.equal(dw, torch.zeros_like(dw))
        out, dx, dw, _ = log_probs_and_gradients(x, weight, target, lambda *a: None, want_dx=True, want_dw=True, want_entropy=True)
        assert out.logp.shape == out.entropy.shape == (0,) and dx.shape == (0, 16) and torch.equal(dw, torch.zeros_like(dw))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("memory", [0, 1])
@pytest.mark.parametrize("function", [ours, one_pass])
def test_long_weight_gradient(function, memory, device):
    """C17: dW and dx of bf16 over many chunks or tiles are summed in fp32."""
    torch.manual_seed(4)
    x, weight, target = make(4096, 64, 4096, torch.bfloat16, device, ignored=0.0)
    upstream = random_upstream(4096, device, "logp")
    _, (dx, dw, _) = function(x, weight, target, upstream=upstream, logits_memory=memory)
    _, (dx64, dw64, _) = truth(x, weight, target, upstream=upstream)
    u = UNIT_ROUNDOFF[torch.bfloat16]
    assert (dw.double() - dw64).norm() <= 1.5 * u * dw64.norm()
    assert (dx.double() - dx64).norm() <= 2 * u * dx64.norm()


@pytest.mark.parametrize("device", devices())
def test_layouts(device):
    """C23: sliced, transposed and misaligned hidden states, weights, labels and upstream gradients; leading dimensions."""
    torch.manual_seed(5)
    for dtype, hidden in ((torch.float32, 33), (torch.bfloat16, 64)):
        x, weight, target = make(50, hidden, 70, dtype, device)
        upstream = random_upstream(50, device)
        expected = ours(x, weight, target, upstream=upstream)
        for layout in LAYOUTS:
            a, b = strided(x, layout).detach().requires_grad_(), strided(weight, layout).detach().requires_grad_()
            out = fused_linear_log_probs(a, b, strided(target, "every_other"), return_entropy=True, return_lse=True)
            torch.autograd.backward((out.logp, out.entropy, out.lse), [strided(g, "every_other") for g in upstream])
            got = (out.logp, out.entropy, out.lse, a.grad, b.grad)
            for g, want in zip(got, (*expected[0], *expected[1][:2]), strict=True):
                torch.testing.assert_close(g, want, rtol=8 * UNIT_ROUNDOFF[dtype], atol=UNIT_ROUNDOFF[dtype])
    hidden = torch.randn(4, 9, 64, device=device, requires_grad=True)
    weight, target = torch.randn(70, 64, device=device), torch.randint(70, (4, 8), device=device)
    out = fused_linear_log_probs(hidden[:, :-1], weight, target, return_hits=True)
    assert out.logp.shape == out.hits.shape == (4, 8)
    out.logp.sum().backward()  # an expanded upstream gradient
    got, hidden.grad = hidden.grad, None
    reference(hidden[:, :-1], weight, target)[0].sum().backward()
    torch.testing.assert_close(got, hidden.grad, rtol=1e-4, atol=1e-4)


def test_every_cpu_variant(monkeypatch):
    """C92: without a feature (AVX-512, bf16 products) the other paths give the same within their rounding; an unknown name is an
    error that lists the known ones."""
    torch.manual_seed(6)
    x, weight, target = make(200, 40, 3333, torch.bfloat16)
    bias, upstream = torch.randn(3333).bfloat16(), random_upstream(200, "cpu")
    results = []
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_FUSED_LINEAR_LOG_PROBS", variant)
        try:
            for function in (ours, one_pass):
                results.append(check(function, x, weight, target, 1, bias=bias, upstream=upstream)[1])
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
    u = UNIT_ROUNDOFF[torch.bfloat16]
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert (got.double() - want.double()).norm() <= 3 * u * want.double().norm()
    monkeypatch.setenv("LIGER_FUSED_LINEAR_LOG_PROBS", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        fused_linear_log_probs(x, weight, target)
