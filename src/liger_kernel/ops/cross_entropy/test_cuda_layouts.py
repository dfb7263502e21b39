"""Every CUDA layout of cross_entropy, aligned and not: more rows than clusters are resident, ignored rows in between, in place,
smoothing, loss only. Skipped without a CUDA device."""

import pytest
import torch

from liger_kernel import _native
from liger_kernel.core.accuracy import CORE_ERROR, assert_accurate
from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.cross_entropy.cases import grad_bound, loss_bound
from liger_kernel.ops.cross_entropy.ref import rows as reference_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# (rows, bytes of a row / 2): for 16-bit types one shape in each layout of plan.h, both ends of its range, an odd one beside.
SHAPES = [
    (700, 4096), (700, 16384), (700, 16377),  # 512 threads x 4
    (500, 32000), (500, 32768), (500, 31999),  # 512 x 8
    (400, 50304), (400, 57344), (400, 50257),  # 1024 x 7
    (400, 57352), (400, 65536), (400, 60001),  # 1024 x 8
    (300, 65600), (200, 128256), (100, 131072), (200, 128257), (160, 151665),  # cluster 2, in registers or with shared memory
    (150, 262144), (130, 262147), (110, 338944),
    (100, 338952), (70, 524288), (70, 500001), (60, 677888),  # cluster 4
    (50, 677896), (40, 1048576), (35, 1000003), (30, 1355776),  # cluster 8
    (20, 1500000),  # two passes
]


def run(x, target, smoothing=0.0, z=0.0, in_place=False, want_grad=True, weight=None):
    stats = labels.ask(target, x.shape[1], class_weight=weight).device
    options = (target, weight, stats, None, -100, smoothing, z, 0.0, 1.0, True, False)
    if in_place:
        return *torch.ops.liger_kernel.cross_entropy_forward_(x, *options, True, False, False)[:2], x
    loss, z_loss, _, _, grad = torch.ops.liger_kernel.cross_entropy_forward(x, *options, want_grad, True, False, False)
    return loss, z_loss, grad


def make(rows, vocab, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = (2 * torch.randn(rows, vocab, device="cuda", generator=generator)).to(dtype)
    target = torch.randint(vocab, (rows,), device="cuda", generator=generator)
    target[0], target[1], target[2] = 0, vocab - 1, vocab // 2
    target[5::7] = -100
    x[torch.arange(3, rows, 4), target[3::4].clamp(min=0)] = 12.0  # confident rows
    return x, target


def check(x, target, loss, z, grad, some, **options):
    """The rows `some` against fp64."""
    count = (target != -100).sum()
    for row in some:
        part, label = x[row : row + 1], target[row : row + 1]
        x64 = part.double().requires_grad_()
        sums, _ = reference_rows(x64, label, reduction="sum", **options)
        (truth,) = torch.autograd.grad(sums.sum() / count, x64)
        bound = loss_bound(part, label, reduction="sum", **options) / count.item()
        assert_accurate(loss[row : row + 1], sums.detach() / count, bound, what=f"loss of row {row}")
        one = torch.ones((), device="cuda") / count
        bound = grad_bound(part, label, one, truth, reduction="sum", **options)
        assert_accurate(grad[row : row + 1], truth, bound, what=f"grad of row {row}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout(shape):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rows, vocab = shape if dtype != torch.float32 else (shape[0], shape[1] // 2)
        x, target = make(rows, vocab, dtype)
        some = [0, 1, 2, 3, 5, 6, 7, rows // 2, rows - 2, rows - 1]
        for options in ({}, {"label_smoothing": 0.1, "lse_square_scale": 1e-3}):
            loss, z, grad = run(x, target, options.get("label_smoothing", 0.0), options.get("lse_square_scale", 0.0))
            check(x, target, loss, z, grad, some, **options)
            ignored = target == -100
            assert not loss[ignored].any() and not grad[ignored].any()
        loss, _, grad = run(x, target)
        alone, _, none = run(x, target, want_grad=False)
        assert torch.equal(alone, loss) and none.numel() == 0
        again = run(x, target)
        assert torch.equal(again[0], loss) and torch.equal(again[2], grad)
        copy = x.clone()
        placed, _, over = run(copy, target, in_place=True)
        assert torch.equal(placed, loss) and torch.equal(over, grad)


@pytest.mark.parametrize("vocab", [16384, 50257, 128256, 128257, 262147])
def test_agrees_with_two_passes(vocab, monkeypatch):
    """Class weights, NaN and infinities, labels out of range: row by row what the general kernel gives."""
    x, target = make(64, vocab, torch.bfloat16)
    x[0, 5], x[1, 6], x[2, 7], x[4, :], x[6, : vocab - 1] = float("nan"), float("inf"), -float("inf"), -float("inf"), -float("inf")
    target[6], target[8], target[9] = vocab - 1, vocab, -3
    weight = torch.rand(vocab, device="cuda")
    results = []
    for variant in ("cuda_read_once", "cuda_two_pass"):
        monkeypatch.setenv("LIGER_CROSS_ENTROPY", variant)
        try:
            results.append([run(x, target), run(x, target, weight=weight, z=0.01)])
        except CORE_ERROR as e:
            pytest.skip(str(e))
    for one, two in zip(*results, strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-7 if a.dtype == torch.bfloat16 else 1e-4, atol=1e-9, equal_nan=True)


def test_offset_and_strided_rows():
    """Rows at every alignment of a 16-byte vector, in place (the gradient then shares it)."""
    for dtype in (torch.bfloat16, torch.float32):
        for offset in range(9):
            wide = torch.randn(9, 70000 + 16, device="cuda").to(dtype)
            target = torch.randint(70000, (9,), device="cuda")
            part = wide[:, offset : offset + 70000]
            before, expected = wide.clone(), run(part.clone(), target)
            loss, _, grad = run(part, target, in_place=True)
            torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=0)
            torch.testing.assert_close(grad, expected[2], rtol=2**-7, atol=1e-10)
            assert torch.equal(wide[:, :offset], before[:, :offset]) and torch.equal(wide[:, offset + 70000 :], before[:, offset + 70000 :])


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 40 << 30, reason="needs 40 GB")
def test_more_than_2_to_31_elements():
    """C79: offsets beyond 32 bits; first, middle and last rows."""
    rows, vocab = 17000, 131072
    x = torch.empty(rows, vocab, device="cuda", dtype=torch.bfloat16).normal_()
    target = torch.randint(vocab, (rows,), device="cuda")
    some = [0, rows // 2, 16384, rows - 1]
    kept = x[some].clone()
    loss, _, grad = run(x, target, in_place=True)
    small, _, small_grad = run(kept, target[some])
    torch.testing.assert_close(loss[some] * rows, small * 4, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad[some].float() * rows, small_grad.float() * 4, rtol=2**-6, atol=1e-9)


def test_explain_names_the_layout():
    _, plan = _native.explain("cross_entropy", [8192, 128256], "bf16", 0)
    assert "cluster of 2" in plan or torch.cuda.get_device_capability() != (9, 0)
