"""DPO, CPO, SimPO, ORPO and KTO against fp64 and against the eager code: every type, dtype and way to the gradients."""

import dataclasses

import pytest
import torch

from liger_kernel.chunked_loss import ref, sequences
from liger_kernel.chunked_loss.preference_cases import IGNORED, KTO, PAIRED, LossBounds, gradients, make, ours, plain
from liger_kernel.core.accuracy import UNIT_ROUNDOFF, assert_accurate, devices

LOSSES = PAIRED | KTO
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_loss = pytest.mark.parametrize("name", LOSSES)
on_devices = pytest.mark.parametrize("device", devices())


@pytest.fixture(params=["tiles", "chunks"])
def way(request, monkeypatch):
    """The losses by one way to the gradients, however many bytes it takes."""
    limit = 0 if request.param == "tiles" else 1 << 40
    for name in ("_CUDA_BYTES", "_CPU_BYTES", "_CPU_BYTES_FP32"):
        monkeypatch.setattr(sequences, name, limit)
    return request.param


def check(loss, batch, **extra):
    """Loss, log-probabilities and gradients within their bounds and twice eager's error; the other metrics near the truth."""
    exact, half = batch.to(torch.float64), batch.to()
    true, true_metrics = plain(loss, exact, **extra)
    true_grads = gradients(true, exact)
    copy = batch.to()
    value, metrics = ours(loss, copy, **extra)
    assert value.dtype == torch.float32 and value.shape == () and len(metrics) == len(true_metrics)
    grads = gradients(value, copy)
    eager, eager_metrics = plain(loss, half, **extra)
    eager_grads = gradients(eager, half)
    bounds = LossBounds(loss, batch)
    assert_accurate(value, true, bounds.loss, eager, "loss")
    n = len(batch.target) // 2
    for i, (got, want, close) in enumerate(zip(metrics, true_metrics, eager_metrics, strict=True)):
        assert got.dtype == torch.float32 and got.shape == want.shape and not got.requires_grad
        if loss.name != "kto" and i < 2:
            assert_accurate(got, want, bounds.logps[i * n : (i + 1) * n], close, f"metric {i}")
        else:
            error, u = float((got.double() - want).abs().max()), UNIT_ROUNDOFF[batch.x.dtype]
            assert error <= max(2 * float((close.double() - want).abs().max()), 100 * u * (1 + float(want.abs().max()))), f"metric {i}"
    for what, got, want, bound, close in zip(("dx", "dw", "db"), grads, true_grads, bounds.gradients(), eager_grads, strict=False):
        assert got.dtype == batch.x.dtype
        assert_accurate(got, want, bound, close, what)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_loss
def test_loss(name, dtype, device, way):
    check(LOSSES[name], make(LOSSES[name], dtype, device))


@on_devices
@pytest.mark.parametrize("shape", [(2, 1, 8, 2), (2, 5, 16, 31), (8, 33, 24, 257), (4, 64, 16, 1003)], ids=str)
@pytest.mark.parametrize("name", ["dpo sigmoid", "cpo", "orpo", "kto"])
def test_shapes(name, shape, device, way):
    batch = make(LOSSES[name], torch.float32, device, *shape, bias=shape[1] % 2 == 0, ignored=shape[1] > 4)
    check(LOSSES[name], batch)


@on_devices
@every_loss
def test_sequences_without_tokens(name, device, way):
    """One sequence, one side, then all of them: everything is finite, and 0 where nothing is."""
    loss = LOSSES[name]
    for empty in ((1,), (0, 1, 2), (3, 4, 5), range(6)):
        batch = make(loss, torch.float32, device)
        batch.target[list(empty)] = IGNORED
        copy, exact = batch.to(), batch.to(torch.float64)
        value, metrics = ours(loss, copy)
        grads = gradients(value, copy)
        true, true_metrics = plain(loss, exact)
        torch.testing.assert_close(value.double(), true, rtol=1e-5, atol=1e-5)
        for got, want in zip(metrics, true_metrics, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
        assert all(bool(g.isfinite().all()) for g in grads)
        assert bool((grads[0][list(empty)] == 0).all())
        if len(empty) == 6:
            assert all(bool((g == 0).all()) for g in grads)


@on_devices
@pytest.mark.parametrize("targets", ["prompt", "same", "different", "none"])
def test_nll_targets(targets, device, way):
    """ORPO's NLL term: over prompt and completion, as TRL asks for; over other tokens than the preference term's."""
    loss = PAIRED["orpo"]
    batch = make(loss, torch.float32, device)
    full = torch.randint(129, batch.target.shape, device=device)
    nll_target = {"prompt": torch.where(batch.target == IGNORED, full, batch.target), "same": batch.target, "different": full,
                  "none": torch.full_like(full, IGNORED)}[targets]
    if targets == "different":
        nll_target[0, :2] = IGNORED
    copy, exact = batch.to(), batch.to(torch.float64)
    value, metrics = ours(loss, copy, nll_target=nll_target)
    true, true_metrics = plain(loss, exact, nll_target=nll_target)
    torch.testing.assert_close(value.double(), true, rtol=1e-6, atol=1e-6)
    for got, want in zip(metrics, true_metrics, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients(value, copy), gradients(true, exact), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


@on_devices
def test_metrics_of_two_pairs(device):
    """C40: shapes, means over pairs, positions and vocabulary, rewards to the reference model."""
    loss = PAIRED["dpo sigmoid"]
    for chunk_size in (1, 2):
        chosen = dataclasses.replace(loss, options=loss.options | {"chunk_size": chunk_size})
        batch = make(loss, torch.float32, device, sequences=4, length=5, vocab=7, ignored=False)
        batch.target[1, 3:] = batch.target[3, 3:] = IGNORED
        _, (c, r, c_mean, r_mean, nll, c_reward, r_reward) = ours(chosen, batch)
        logps, logits = ref.sequence_log_probs(batch.x, batch.weight, batch.target, batch.bias)
        base = ref.sequence_log_probs(batch.reference[0], batch.reference[1], batch.target, batch.reference[2])[0]
        assert c.shape == r.shape == c_reward.shape == r_reward.shape == (2,) and c_mean.shape == r_mean.shape == nll.shape == ()
        torch.testing.assert_close(torch.cat([c, r]), logps)
        torch.testing.assert_close(torch.cat([c_reward, r_reward]), 0.1 * (logps - base))
        torch.testing.assert_close(torch.stack([c_mean, r_mean]), torch.stack([logits[:2].sum(), logits[2:].sum()]) / (2 * 5 * 7))


@on_devices
@pytest.mark.parametrize("name", ["orpo without nll", "kto", *(n for n in PAIRED if n.startswith("dpo ") and len(n.split()) == 2)])
def test_extreme_log_probabilities(name, device, way):
    """Near-certain sequences in ORPO, log-ratios of hundreds in DPO: what the definition gives, in fp32, and no NaN."""
    loss, vocab, length = LOSSES[name], 8, 3
    weight, no_bias = torch.eye(vocab, device=device), None
    target = torch.arange(4 * length, device=device).view(4, length) % vocab
    for scale in (15.0, 25.0, 60.0, 300.0):
        x = torch.nn.functional.one_hot(target, vocab).float() * scale
        x[2:] = x[2:].flip(-1)  # the rejected ones are all but impossible
        for order in (range(4), (2, 3, 0, 1)):
            batch = make(loss, torch.float32, device, 4, length, vocab, vocab, bias=False, ignored=False)
            batch = dataclasses.replace(batch, x=x[list(order)], target=target[list(order)], weight=weight,
                                        reference=batch.reference and (x * 0, weight, no_bias))
            value, _ = ours(loss, copy := batch.to())
            true, _ = plain(loss, batch.to(torch.float64, requires_grad=False))
            if float(true) > 3e38:  # discopop's exponential
                assert value.isinf()
                continue
            assert all(bool(g.isfinite().all()) for g in gradients(value, copy) if g is not None)
            if name != "orpo without nll" or scale < 30:  # beyond, the definition itself needs more than fp64
                torch.testing.assert_close(value.detach().double(), true, rtol=1e-5, atol=1e-5)


@on_devices
@pytest.mark.parametrize("name", ["dpo sigmoid", "orpo", "kto"])
def test_half_precision_gradients_survive(name, device):
    """fp16: coefficients below its smallest number do not vanish when the upstream gradient is a loss scaler's."""
    loss = LOSSES[name]
    batch = make(loss, torch.float16, device, length=40, ignored=False)
    smaller = [{"beta": 1e-4} | ({name: False} if name in had else {})
               for name, had in (("compute_nll_loss", loss.options), ("nll", loss.truth))]
    loss = dataclasses.replace(loss, options=loss.options | smaller[0], truth=loss.truth | smaller[1])
    copy, exact = batch.to(), batch.to(torch.float64)
    got = gradients(ours(loss, copy)[0] * 65536, copy)
    want = gradients(plain(loss, exact)[0] * 65536, exact)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float16 and (g.double() - w).norm() <= 1e-2 * w.norm()
