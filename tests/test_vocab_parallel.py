"""Vocab-parallel cross entropy: on one rank, and on the ranks of tests/parallel, against the whole loss in fp64."""

import inspect
import pathlib
import sys

import pytest
import torch

from liger_kernel import ops
from liger_kernel.core.accuracy import LAYOUTS, assert_accurate, devices, strided
from liger_kernel.ops import vocab_parallel_cross_entropy as module
from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy

sys.path.append(str(pathlib.Path(__file__).parent / "parallel"))
each_device = pytest.mark.parametrize("device", devices())
INF = float("inf")
SMOOTHINGS = [(0.0, "pytorch", "global"), *((0.1, f, m) for f in ("pytorch", "megatron") for m in ("global", "partition"))]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    from ranks import Ranks

    group = Ranks(tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


def reference(shard, target, others=(), smoothing=0.0, formula="pytorch", mode="global", ignore_index=-100):
    """The loss (S, B) in fp64 that the rank of `shard` should find; `others` are (shards before it, shards after it). Its derivative
    with respect to `shard` is the gradient of that rank."""
    before, after = others or ((), ())
    whole = torch.cat([t.double() for t in (*before, shard, *after)], -1)
    valid = target != ignore_index
    logp = whole.log_softmax(-1)
    loss = -logp.gather(-1, torch.where(valid, target, 0)[..., None])[..., 0]
    if smoothing:
        first = sum(t.shape[-1] for t in before)
        part = logp if mode == "global" else logp[..., first: first + shard.shape[-1]]
        classes = part.shape[-1]
        smoothing = smoothing * classes / (classes - 1) if formula == "megatron" else smoothing
        loss = (1 - smoothing) * loss - smoothing * part.mean(-1)
    return torch.where(valid, loss, 0.0)


def inputs(shape, device="cpu", dtype=torch.float32, seed=0, scale=3.0, vocab=None):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * scale).to(device, dtype)
    target = torch.randint(0, vocab or shape[-1], shape[:2], generator=generator)
    target[..., ::3] = -100
    return logits, target.to(device)


def run(function, logits, upstream):
    leaf = logits.detach().requires_grad_()
    loss = function(leaf)
    (grad,) = torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))
    return loss.detach(), grad


def compare(got, want, logits):
    """Loss: fp32 arithmetic. Gradient: fp32 arithmetic whose exponent carries the error of the log-sum, rounded once."""
    size = logits.detach().double().abs().nan_to_num(0, 0, 0).max() if logits.numel() else 1
    noise = 2**-24 * (32 + 4 * float(size))
    assert got[0].dtype == torch.float32 and got[1].dtype == logits.dtype
    assert_accurate(got[0], want[0], noise * (1 + want[0].abs()), what="loss")
    assert_accurate(got[1], want[1], noise * (1 + want[1].abs()), what="gradient")


def check(logits, target, smoothing=(0.0, "pytorch", "global"), upstream=None, ignore_index=-100):
    before = logits.detach().clone()
    upstream = torch.linspace(-2, 2, target.numel(), device=logits.device).view(target.shape) if upstream is None else upstream
    loss = LigerVocabParallelCrossEntropy(ignore_index, smoothing[0], "none", *smoothing[1:])
    got = run(lambda x: loss(x, target), logits, upstream)
    compare(got, run(lambda x: reference(x.double(), target, (), *smoothing, ignore_index), logits, upstream), logits)
    assert torch.equal(logits.detach(), before)


# --- one rank -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 7), (5, 3, 128), (2, 4, 1000), (4, 1, 4097), (0, 2, 16), (2, 0, 16)], ids=str)
@pytest.mark.parametrize("smoothing", SMOOTHINGS, ids=str)
@each_device
def test_one_rank(shape, dtype, smoothing, device):
    check(*inputs(shape, device, dtype), smoothing)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_device
def test_layouts(layout, device):
    for dtype in (torch.float32, torch.bfloat16):
        logits, target = inputs((4, 3, 96), device, dtype)
        for smoothing in SMOOTHINGS[:2]:
            check(strided(logits.view(12, 96), layout).unflatten(0, (4, 3)), target, smoothing)
            check(logits.transpose(0, 1), target.T, smoothing)


@each_device
def test_any_ignored_index(device):
    """It may be a class, whose logit is then nobody's target."""
    logits, target = inputs((4, 6, 11), device)
    for ignore_index in (0, 5, -1, -100, 4000):
        check(logits, torch.where(target == -100, ignore_index, target), ignore_index=ignore_index)
        check(logits, torch.full_like(target, ignore_index), SMOOTHINGS[1], ignore_index=ignore_index)


@each_device
def test_large_and_masked_logits(device):
    logits, target = inputs((4, 3, 64), device, scale=1.0)
    check(logits + 3e4, target)
    check(logits * 1e4, target)
    logits[..., 40:] = -INF
    target = target.clamp(max=39)
    check(logits, target)
    loss = LigerVocabParallelCrossEntropy()
    for value in (float("nan"), INF):
        logits[1, 1, 3], target[1, 1] = value, 5
        mine = loss(logits, target)
        assert mine[1, 1].isnan() and mine[0].isfinite().all()
    assert loss(torch.full((1, 1, 4), -INF, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)).isnan().all()


@each_device
def test_probability_of_one(device):
    """The loss of a target whose probability rounds to one is not zero: log-probabilities are not logarithms of rounded numbers."""
    logits = torch.tensor([[[0.0, 22.0, 3.0]]], device=device)
    check(logits, torch.tensor([[1]], device=device))
    loss = LigerVocabParallelCrossEntropy()(logits, torch.tensor([[0]], device=device))
    assert abs(loss.item() - 22) < 1e-5


@each_device
def test_no_worse_than_eager(device):
    for dtype in (torch.bfloat16, torch.float16):
        logits, target = inputs((16, 8, 2000), device, dtype)
        ones = torch.ones(target.shape, device=device)
        for smoothing in SMOOTHINGS[:2]:
            truth = run(lambda x: reference(x, target, (), *smoothing), logits.double(), ones)  # noqa: B023
            loss = LigerVocabParallelCrossEntropy(label_smoothing=smoothing[0])
            ours = run(lambda x: loss(x, target), logits, ones)  # noqa: B023
            eager = run(lambda x: torch.nn.functional.cross_entropy(
                x.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing[0]).view(target.shape), logits, ones)  # noqa: B023
            for mine, theirs, true in zip(ours, eager, truth, strict=True):
                assert (mine.double() - true).abs().max() <= 2 * (theirs.double() - true).abs().max()


@each_device
def test_gradients_twice_and_of_the_second_order(device):
    logits, target = inputs((3, 4, 20), device)
    logits.requires_grad_()
    for smoothing in SMOOTHINGS[:2]:
        loss = LigerVocabParallelCrossEntropy(label_smoothing=smoothing[0])(logits, target).sum()
        (once,), (again,) = (torch.autograd.grad(loss, logits, retain_graph=True) for _ in range(2))
        assert torch.equal(once, again)
        (kept,) = torch.autograd.grad(loss, logits, create_graph=True)
        with pytest.raises(RuntimeError, match="vocab_parallel_cross_entropy: its gradient has no derivative"):
            kept.square().sum().backward()
    frozen = LigerVocabParallelCrossEntropy()(logits.detach(), target)
    assert not frozen.requires_grad


@each_device
def test_compiled(device):
    logits, target = inputs((4, 3, 50), device)
    for smoothing in SMOOTHINGS[:2]:
        loss = LigerVocabParallelCrossEntropy(label_smoothing=smoothing[0])
        upstream = torch.rand(target.shape, device=device)
        compiled = torch.compile(lambda x: loss(x, target), fullgraph=True, backend="aot_eager")  # noqa: B023
        for got, want in zip(run(compiled, logits, upstream), run(lambda x: loss(x, target), logits, upstream), strict=True):  # noqa: B023
            torch.testing.assert_close(got, want)


@each_device
def test_autocast(device):
    logits, target = inputs((4, 3, 50), device, torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        check(logits, target)


# --- errors ---------------------------------------------------------------------------------------------------------------------


def test_errors():
    logits, target = inputs((2, 3, 10))
    for options, text in ((dict(reduction="mean"), "'mean', expected 'none'"), (dict(label_smoothing=1.0), "1.0, expected"),
                          (dict(label_smoothing=-0.1), "-0.1, expected"), (dict(label_smoothing_formula="hf"), "'hf', expected"),
                          (dict(label_smoothing_mode="local"), "'local', expected")):
        with pytest.raises(ValueError, match=text):
            LigerVocabParallelCrossEntropy(**options)
    for formula, mode in (("x", "global"), ("pytorch", "x"), (None, "global")):
        with pytest.raises(ValueError, match="expected one of"):
            module.validate_formula_and_mode(formula, mode)
    module.validate_formula_and_mode("megatron", "partition")
    loss = LigerVocabParallelCrossEntropy()
    for bad in (logits[0], logits[None]):
        with pytest.raises(ValueError, match=r"expected \(S, B, V / P\)"):
            loss(bad, target)
    with pytest.raises(ValueError, match=r"target \(3, 2\)"):
        loss(logits, target.T)
    with pytest.raises(ValueError, match="no column"):
        loss(logits[..., :0], target)
    with pytest.raises(ValueError, match="one class"):
        LigerVocabParallelCrossEntropy(-100, 0.1, "none", "megatron", "partition")(logits[..., :1], target * 0)
    with pytest.raises(RuntimeError, match="expected class indices"):
        loss(logits, target.float())
    for bad, text in ((10, "Target 10 is out of bounds. Expected >= 0 and < 10"), (-7, "Target -7 is out of bounds")):
        with pytest.raises(AssertionError, match=text):
            loss(logits, target.index_fill(1, torch.tensor([1]), bad))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_target_out_of_range_is_nan_on_cuda():
    logits, target = inputs((2, 3, 10), "cuda")
    target[1, 1] = 10
    loss = LigerVocabParallelCrossEntropy()(logits, target)
    assert loss[1, 1].isnan() and loss[0].isfinite().all()


def test_names():
    assert list(inspect.signature(LigerVocabParallelCrossEntropy).parameters) == [
        "ignore_index", "label_smoothing", "reduction", "label_smoothing_formula", "label_smoothing_mode"]
    assert ops.LigerVocabParallelCEFunction is module.LigerVocabParallelCEFunction


# --- several ranks --------------------------------------------------------------------------------------------------------------


def _on_ranks(columns, dtype, where):
    """Every rank against the whole loss, whose gradient it holds its columns of."""
    import torch.distributed as dist
    from ranks import DEVICE

    rank, world = dist.get_rank(), dist.get_world_size()
    whole, target = inputs((5, 4, columns * world), DEVICE, dtype, seed=1)
    if where == "elsewhere":  # C14: every target lies in the last shard
        target = torch.where(target == -100, target, columns * (world - 1) + target % columns)
    elif where == "masked":  # one shard without a finite logit
        whole[..., columns * (world - 1):] = -INF
        target = torch.where(target == -100, target, target % columns)
    shards = whole.split(columns, -1)
    upstream = torch.linspace(-2, 2, target.numel(), device=DEVICE).view(target.shape)
    smoothings = SMOOTHINGS[:1] if where == "masked" else SMOOTHINGS
    for smoothing in smoothings:
        loss = LigerVocabParallelCrossEntropy(-100, smoothing[0], "none", *smoothing[1:])
        got = run(lambda x: loss(x, target, dist.group.WORLD), shards[rank], upstream)  # noqa: B023
        others = (shards[:rank], shards[rank + 1:])
        want = run(lambda x: reference(x, target, others, *smoothing), shards[rank].double(), upstream)  # noqa: B023
        compare(got, want, shards[rank])
    with pytest.raises(AssertionError if DEVICE == "cpu" else ValueError, match="out of bounds" if DEVICE == "cpu" else ""):
        if DEVICE != "cpu":
            raise ValueError
        loss(shards[rank], torch.full_like(target, columns * world), dist.group.WORLD)


@pytest.mark.parametrize("where", ["anywhere", "elsewhere", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [8, 1000])
def test_ranks(ranks, columns, dtype, where):
    ranks(_on_ranks, columns, dtype, where)


def _communication():
    """Two collectives forward, none backward; a group of one rank needs none."""
    import torch.distributed as dist
    from ranks import DEVICE

    calls, original = [], dist.all_reduce
    dist.all_reduce = lambda *args: calls.append(args[1]) or original(*args)
    try:
        logits, target = inputs((2, 3, 10), DEVICE, vocab=10)
        logits.requires_grad_()
        for smoothing in SMOOTHINGS:
            loss = LigerVocabParallelCrossEntropy(-100, smoothing[0], "none", *smoothing[1:])
            calls.clear()
            result = loss(logits, target, dist.group.WORLD)
            assert calls == [dist.ReduceOp.MAX, dist.ReduceOp.SUM]
            result.sum().backward()
            loss(logits, target)
            assert len(calls) == 2
    finally:
        dist.all_reduce = original
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch.testing.assert_close(loss(logits, target, alone), loss(logits, target))


def test_communication(ranks):
    ranks(_communication)
