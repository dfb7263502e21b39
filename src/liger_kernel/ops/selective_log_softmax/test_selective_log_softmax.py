"""selective_log_softmax against fp64: dtypes, widths, layouts, masks, upstream gradients, in place, compilers."""

import pytest
import torch

from liger_kernel._native import ops as native
from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, assert_accurate, devices, strided
from liger_kernel.ops.cross_entropy.labels import NO_LABEL
from liger_kernel.ops.selective_log_softmax import completion_targets, fused_selective_log_softmax, selective_log_softmax
from liger_kernel.ops.selective_log_softmax.cases import DTYPES, SHAPES, Bounds
from liger_kernel.ops.selective_log_softmax.ref import eager, reference

on_devices = pytest.mark.parametrize("device", devices())


def make(shape, dtype, device="cpu", scale=4.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    sequences, tokens, vocab = shape
    logits = (torch.randn(shape, generator=g) * scale).to(dtype).to(device)
    index = torch.randint(vocab, (sequences, tokens), generator=g).to(device)
    up = [torch.randn((sequences, tokens), generator=g).to(device) for _ in range(2)]
    return logits, index, up


def run(function, logits, index, up, **options):
    leaf = logits.detach().clone().requires_grad_() if logits.is_contiguous() else logits.detach().requires_grad_()
    results = function(leaf, index, **options)
    results = results if isinstance(results, tuple) else (results,)
    (grad,) = torch.autograd.grad(results, leaf, [u.to(r.dtype) for r, u in zip(results, up, strict=False)])
    return *results, grad


def check(logits, index, up, temperature=1.0, **options):
    logp, entropy, grad = run(selective_log_softmax, logits, index, up, temperature=temperature, return_entropy=True, **options)
    assert grad.dtype == logits.dtype and logp.dtype == entropy.dtype == torch.float32
    truth = run(reference, logits.double(), index, up, temperature=temperature)
    bounds = Bounds(logits, index, temperature, *up)
    for what, got, want, bound in zip(("logp", "entropy", "grad"), (logp, entropy, grad), truth,
                                      (bounds.logp, bounds.entropy, bounds.grad), strict=True):
        assert_accurate(got, want, bound, what=what)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_fp64(shape, dtype, device):
    check(*make(shape, dtype, device))


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.3, 0.9, 2.0])
def test_temperature_and_eager(dtype, temperature, device):
    logits, index, up = make((2, 9, 5003), dtype, device, scale=8)
    check(logits, index, up, temperature)
    logp, grad = run(selective_log_softmax, logits, index, up[:1], temperature=temperature)
    theirs = run(eager, logits, index, up[:1], temperature=temperature)
    want = run(lambda *a, **k: reference(*a, **k)[0], logits.double(), index, up[:1], temperature=temperature)
    bounds = Bounds(logits, index, temperature, up[0])
    assert_accurate(logp, want[0], bounds.logp, theirs[0], "logp")
    assert_accurate(grad, want[1], bounds.grad, theirs[1], "grad")


@on_devices
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    logits, index, up = make((3, 4, 257), torch.bfloat16, device)
    check(strided(logits, layout), strided(index, "every_other"), up)


@on_devices
@pytest.mark.parametrize("part", [(0, -1), (1, None), (1, -1)])
def test_parts_of_longer_sequences_are_not_copied(part, device):
    logits, index, up = make((3, 6, 301), torch.float32, device)
    whole = logits.clone().requires_grad_()
    begin, end = part
    logits, index, up = logits[:, begin:end], index[:, begin:end], [u[:, begin:end].contiguous() for u in up]
    check(logits, index, up)
    view = whole[:, begin:end]
    got = torch.autograd.grad(selective_log_softmax(view, index), whole, up[0])[0]
    want = run(eager, logits, index, up[:1])[1]
    torch.testing.assert_close(got[:, begin:end], want)
    assert not got[:, :begin].any() and (end is None or not got[:, end:].any())


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_positions(dtype, device):
    logits, index, up = make((3, 5, 97), dtype, device)
    index[0, 1] = index[2] = -100
    logits[0, 1] = float("nan")  # not read
    up[0][0, 1] = float("nan")
    logp, entropy, grad = run(selective_log_softmax, logits, index, up, return_entropy=True)
    for t in (logp, entropy, grad):
        assert not t[0, 1].any() and not t[2].any()
        assert bool(t.isfinite().all())


@on_devices
def test_near_certain_tokens_and_extremes(device):
    logits = torch.zeros(1, 6, 50, device=device)
    logits[0, 0, 3] = 20.0  # 1 - p = 49 e^-20
    logits[0, 1] = -1e30
    logits[0, 2, 3] = float("inf")
    logits[0, 3, 7] = float("nan")
    logits[0, 4, 5] = float("-inf")
    index = torch.full((1, 6), 3, device=device)
    logp = selective_log_softmax(logits, index)[0]
    assert_accurate(logp[:1], torch.log_softmax(logits[0, :1].double(), -1)[:, 3], 1e-5 * 49 * 2.07e-9)
    assert_accurate(logp[1:2], torch.log_softmax(logits[0, 1:2].double(), -1)[:, 3], 1e-6)
    assert bool(logp[2:4].isnan().all()) and bool(logp[4:].isfinite().all())


@on_devices
def test_in_place(device):
    logits, index, up = make((2, 3, 130), torch.bfloat16, device)
    want = run(selective_log_softmax, logits, index, up[:1])[1]

    def start():
        leaf = logits.clone().requires_grad_()
        return leaf, leaf * 1

    leaf, inner = start()
    loss = (selective_log_softmax(inner, index, in_place=True) * up[0]).sum()
    loss.backward()
    assert torch.equal(leaf.grad, want) and torch.equal(inner.detach(), want)  # written over the logits

    leaf, inner = start()  # another operation saved the logits: autograd notices
    squares = inner.square()
    total = (selective_log_softmax(inner, index, in_place=True) * up[0]).sum()
    total.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()

    leaf, inner = start()  # a kept graph is not overwritten
    loss = (selective_log_softmax(inner, index, in_place=True) * up[0]).sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, leaf, retain_graph=True)[0], want)

    leaf, _ = start()  # nor is a parameter
    (selective_log_softmax(leaf, index, in_place=True) * up[0]).sum().backward()
    assert torch.equal(leaf.grad, want) and torch.equal(leaf.detach(), logits)


@on_devices
def test_second_derivative_is_refused(device):
    logits, index, _ = make((1, 3, 20), torch.float32, device)
    leaf = logits.requires_grad_()
    (grad,) = torch.autograd.grad(selective_log_softmax(leaf, index).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="its gradient has no derivative"):
        grad.sum().backward()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_form(dtype, device):
    logits, ids, _ = make((3, 5, 303), dtype, device)
    ids = torch.cat([ids, ids], 1)  # a prompt in front; the last columns count
    mask = torch.ones(3, 10, device=device, dtype=torch.int32)
    mask[:, -2] = 0
    want = reference(logits[:, :-1].double(), ids[:, -4:], 0.9)[0]
    bound = Bounds(logits[:, :-1], ids[:, -4:], 0.9).logp
    leaf = logits.requires_grad_()
    plain, masked = fused_selective_log_softmax(leaf, ids), fused_selective_log_softmax(leaf, ids[:, -4:], 0.9, mask)
    assert plain.dtype == torch.float32 and not plain.requires_grad and plain.shape == (3, 4)
    assert_accurate(plain, want, bound)
    want[:, -2] = 0
    assert_accurate(masked, want, bound)
    strange = strided(ids, "every_other").to(torch.int32)
    torch.testing.assert_close(fused_selective_log_softmax(leaf, strange, 0.9, strided(mask, "transposed")), masked)
    with pytest.raises(AssertionError, match="contiguous"):
        fused_selective_log_softmax(leaf[:, :-1], ids)


@on_devices
def test_nothing_to_do(device):
    for shape in ((0, 3, 7), (2, 0, 7)):
        logits = torch.zeros(shape, device=device, requires_grad=True)
        selective_log_softmax(logits, torch.zeros(shape[:2], dtype=torch.int64, device=device)).sum().backward()
        assert logits.grad.shape == shape
    none = torch.zeros(2, 0, dtype=torch.int64, device=device)
    assert fused_selective_log_softmax(torch.zeros(2, 1, 7, device=device), none).shape == (2, 0)


def test_errors():
    logits, index, _ = make((2, 3, 11), torch.float32)
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            selective_log_softmax(logits, index, temperature)
        with pytest.raises(ValueError, match="temperature"):
            fused_selective_log_softmax(logits, index, temperature)
    with pytest.raises(ValueError, match=r"index is \(2, 2\)"):
        selective_log_softmax(logits, index[:, :-1])
    with pytest.raises(ValueError, match="expected"):
        fused_selective_log_softmax(logits, index[:1])
    with pytest.raises(RuntimeError, match="indices"):
        selective_log_softmax(logits, index.float())
    with pytest.raises(AssertionError, match="out of bounds"):
        selective_log_softmax(logits, index + 11)
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        selective_log_softmax(logits.double(), index)


@on_devices
def test_compile(device):
    logits, index, up = make((2, 4, 130), torch.float32, device)

    def function(x, i):
        logp, entropy = selective_log_softmax(x[:, :-1], i[:, :-1], 0.7, return_entropy=True)
        return (logp * up[0][:, :-1]).sum() + entropy.sum()

    got, want = (logits.clone().requires_grad_() for _ in range(2))
    torch.compile(function, fullgraph=True)(got, index).backward()
    function(want, index).backward()
    torch.testing.assert_close(got.grad, want.grad)


@on_devices
def test_opcheck(device):
    logits, index, up = make((1, 4, 37), torch.float32, device)
    logits, index, up = logits[0], index[0], [u[0] for u in up]
    logp, largest, log_sum, entropy = native.selective_log_softmax_forward(logits, index, -100, 1.0, True)
    arguments = (logits, index, logp, largest, log_sum, entropy, *up, -100, 1.0)
    tests = ["test_schema", "test_faketensor"]
    torch.library.opcheck(torch.ops.liger_kernel.selective_log_softmax_forward, (logits, index, -100, 1.0, True), test_utils=tests)
    torch.library.opcheck(torch.ops.liger_kernel.selective_log_softmax_backward, arguments, test_utils=tests)
    torch.library.opcheck(torch.ops.liger_kernel.selective_log_softmax_backward_, arguments, test_utils=tests)


def test_completion_targets():
    ids = torch.arange(8).view(2, 4)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    got = completion_targets("op", torch.zeros(2, 4, 9), ids, mask).view(2, 4)
    assert got.tolist() == [[1, 2, NO_LABEL, NO_LABEL], [NO_LABEL, 6, 7, NO_LABEL]]


@on_devices
def test_meta_and_shapes(device):
    logits = torch.zeros(2, 3, 5, device="meta", requires_grad=True)
    selective_log_softmax(logits, torch.zeros(2, 3, dtype=torch.int64, device="meta")).sum().backward()
    assert logits.grad.shape == logits.shape
