"""The fused linear GRPO losses against fp64: every type, level and option, dtypes, masks, frozen tensors, upstream gradients, both ways
to the gradients, subclasses, errors."""

import warnings

import pytest
import torch

from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, grpo_loss
from liger_kernel.chunked_loss.functional import liger_fused_linear_grpo
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction, clip_coef_fn, get_gamma_weights, k3_loss_fn, sapo_loss_fn
from liger_kernel.chunked_loss.ref_grpo import eager, log_probs, loss_of, reference
from liger_kernel.core.accuracy import assert_accurate, devices
from liger_kernel.ops.fused_linear_log_probs.cases import Bounds
from liger_kernel.ops.grpo_loss.cases import CLIPPED, DTYPES, OPTIONS, TYPES, term_bounds

on_devices = pytest.mark.parametrize("device", devices())
LEVELS = [(t, "token") for t in TYPES] + [(t, "sequence") for t in CLIPPED]


def inputs(shape=(4, 9, 24, 61), dtype=torch.float32, device="cpu", bias=False, importance=None, seed=0, **_):
    """_input, weight, ids, mask, advantages, bias, ref, old, importance ratios: as of ops/grpo_loss/cases.py, with a linear layer."""
    g = torch.Generator().manual_seed(seed)
    sequences, tokens, hidden, vocab = shape
    x = torch.randn(sequences, tokens, hidden, generator=g).to(dtype)
    weight = (torch.randn(vocab, hidden, generator=g) / hidden**0.5 * 2).to(dtype)
    b = torch.randn(vocab, generator=g).to(dtype) if bias else None
    ids = torch.randint(vocab, (sequences, tokens), generator=g)
    mask = (torch.rand(sequences, tokens, generator=g) < 0.8).float()
    if sequences > 2:
        mask[1] = 0
    advantages = torch.randn(sequences, generator=g)
    logp = log_probs(x.float(), weight.float(), ids, None if b is None else b.float())
    ref, old = (logp + 0.3 * torch.randn(logp.shape, generator=g) for _ in range(2))
    ratios = None if importance is None else torch.rand((sequences, tokens) if importance == "tokens" else (sequences,), generator=g) + 0.5
    return [None if t is None else t.to(device) for t in (x, weight, ids, mask, advantages, b, ref, old, ratios)]


def ours(x, weight, ids, mask, advantages, bias=None, ref=None, old=None, temperature=1.0, *, loss_type="dapo", level="token",
         epsilon_low=0.2, epsilon_high=0.2, beta=0.0, delta=None, bias_correction=False, tau=(1.0, 1.05), importance=None,
         vespo=(2.0, 3.0, 3.0, 2.0), max_completion_length=None, num_items=None):
    module = LigerFusedLinearGRPOLoss(
        beta=beta, use_ref_model=beta != 0 and ref is not None, epsilon_low=epsilon_low, epsilon_high=epsilon_high, loss_type=loss_type,
        max_completion_length=max_completion_length, importance_sampling_level=level, sapo_temperature_pos=tau[0],
        sapo_temperature_neg=tau[1], temperature=temperature, delta=delta, use_bias_correction_kl=bias_correction, vespo_k_pos=vespo[0],
        vespo_lambda_pos=vespo[1], vespo_k_neg=vespo[2], vespo_lambda_neg=vespo[3])
    loss, metrics = module(_input=x, lin_weight=weight, selected_token_ids=ids, attention_mask=mask, advantages=advantages, bias=bias,
                           ref_per_token_logps=ref, old_per_token_logps=old, vllm_is_ratio=importance, num_items_in_batch=num_items)
    assert isinstance(metrics, tuple) and len(metrics) == (2 if beta else 1)
    for t in (loss, *metrics):
        assert t.dtype == torch.float32 and t.dim() == 0
    assert not any(m.requires_grad for m in metrics)
    return loss, (metrics[0] if beta else None), metrics[-1]


def double(t):
    return t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t


def run(function, x, weight, bias, *others, upstream=1.7, wanted=(True, True, True), **options):
    """(loss, kl, clip, dx, dw, db)."""
    leaves = [None if t is None else t.detach().clone().requires_grad_(w) for t, w in zip((x, weight, bias), wanted, strict=True)]
    ids, mask, advantages, ref, old = others
    loss, kl, clip = function(leaves[0], leaves[1], ids, mask, advantages, leaves[2], ref, old, **options)
    (loss * upstream).backward()
    return [loss.detach(), kl, clip] + [None if t is None else t.grad for t in leaves]


def check(loss_type, level, option, shape=(4, 9, 24, 61), dtype=torch.float32, device="cpu", temperature=1.0, bias=False, old=True,
          against_eager=True):
    options = {"loss_type": loss_type, "level": level} | OPTIONS[option]
    if loss_type == "dr_grpo":
        options["max_completion_length"] = 17
    x, weight, ids, mask, advantages, b, ref, old_logp, importance = inputs(shape, dtype, device, bias=bias, **options)
    options["importance"], old_logp = importance, old_logp if old else None
    arguments = (x, weight, b, ids, mask, advantages, ref, old_logp)
    got = run(ours, *arguments, temperature=temperature, **options)
    wide = {k: double(v) for k, v in options.items()}
    want = run(reference, *map(double, arguments), temperature=temperature, **wide)
    theirs = run(eager, *arguments, temperature=temperature, **options) if against_eager else [None] * 6

    # The loss's derivatives by logp carry the error of the log-probabilities; then dz = d_logp (hot - p) / T and its products.
    everything = torch.ones_like(mask)
    bounds = Bounds(x, weight, ids, b, temperature=temperature)
    logp = log_probs(*map(double, (x, weight, ids, b)), temperature)
    used = {k: v for k, v in options.items() if k not in ("loss_type", "max_completion_length", "vespo")}
    counted = everything if loss_type == "luspo" else mask
    _, slope = term_bounds(logp, bounds.logp.view(logp.shape), mask, advantages, ref, old_logp, vespo=loss_type == "vespo" or None, **used)
    leaf = logp.clone().requires_grad_()
    loss = loss_of(leaf, *map(double, (mask, advantages, ref, old_logp)), **wide)[0]
    exact = torch.autograd.grad(1.7 * loss, leaf)[0]
    lengths = mask.sum(1, keepdim=True)
    share = {"grpo": 1 / lengths.clamp(min=1) / len(mask), "sapo": 1 / lengths.clamp(min=1) / len(mask), "luspo": lengths / mask.numel(),
             "dr_grpo": 1 / (17 * len(mask))}.get(loss_type, 1 / mask.sum().clamp(min=1))
    if loss_type == "luspo" and level == "sequence":
        share = share * mask.shape[1]
    slope = 1.7 * slope * share * counted
    bounds = Bounds(x, weight, ids, b, (exact.abs() + slope, None, None), temperature=temperature)
    p = torch.softmax((torch.nn.functional.linear(*map(double, (x, weight, b))) / temperature), -1).flatten(0, 1)
    hot = torch.zeros_like(p).scatter_(-1, ids.view(-1, 1), 1.0)
    bounds.dz = bounds.dz + slope.reshape(-1, 1) * (p + hot) / temperature
    torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=float((slope * (1 + logp.abs())).sum()) + 1e-6)
    if got[1] is not None:
        torch.testing.assert_close(got[1].double(), want[1], rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-5)
    if dtype == torch.float32:
        torch.testing.assert_close(got[2].double(), want[2])
    sizes = (bounds.dx().view(x.shape), bounds.dw(), bounds.db())
    for name, a, t, bound, e in zip(("dx", "dw", "db"), got[3:], want[3:], sizes, theirs[3:], strict=True):
        if t is not None:
            assert a.dtype == dtype
            assert_accurate(a, t, bound, e, name, one_draw=True)


@on_devices
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_every_type(loss_type, level, option, device):
    if option == "delta" and loss_type not in CLIPPED:
        pytest.skip("delta is for the clipped losses")
    check(loss_type, level, option, shape=(6, 40, 24, 61), device=device, temperature=0.8, bias=True)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1, 8, 3), (3, 70, 32, 257), (5, 33, 64, 1003)])
@pytest.mark.parametrize("loss_type, level", [("dapo", "token"), ("grpo", "sequence"), ("cispo", "token"), ("vespo", "token")])
def test_shapes_and_types(shape, dtype, loss_type, level, device):
    check(loss_type, level, "kl", shape, dtype, device, temperature=1.3, against_eager=shape[1] > 1)


@on_devices
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_without_old_log_probs(loss_type, level, device):
    check(loss_type, level, "corrected kl", device=device, old=False)


@on_devices
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_both_ways_agree(loss_type, level, device, monkeypatch):
    """Chunks of tokens or of whole sequences, and tiles of the vocabulary: the same loss, metrics and gradients."""
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs((5, 70, 16, 301), device=device, bias=True)
    options = {"loss_type": loss_type, "level": level, "beta": 0.1, "max_completion_length": 70}
    want = run(ours, x, weight, b, ids, mask, advantages, ref, old, **options)
    chunks, calls = grpo_loss.log_probs_and_gradients, []

    def small_chunks(*arguments, **more):
        calls.append(more["group"])
        return chunks(*arguments, **more, logits_memory=1)

    monkeypatch.setattr(grpo_loss, "log_probs_and_gradients", small_chunks)
    got = run(ours, x, weight, b, ids, mask, advantages, ref, old, **options)
    sequence = level == "sequence" or loss_type == "vespo"
    assert calls == [70 if sequence else 1]
    for a, b_ in zip(got, want, strict=True):
        torch.testing.assert_close(a, b_, rtol=1e-4, atol=1e-6)
    for name in ("_CPU_BYTES", "_CPU_ROWS", "_CUDA_BYTES"):
        monkeypatch.setattr(grpo_loss, name, 1)
    got = run(ours, x, weight, b, ids, mask, advantages, ref, old, **options)
    assert len(calls) == (1 if sequence or x.is_cuda else 2)
    for a, b_ in zip(got, want, strict=True):
        torch.testing.assert_close(a, b_, rtol=1e-4, atol=1e-6)


@on_devices
@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(50.0), torch.tensor(3)])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "grpo"])
def test_normalisers(loss_type, num_items, device):
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs(device=device)
    options = {"loss_type": loss_type, "num_items": num_items}
    got = run(ours, x, weight, b, ids, mask, advantages, ref, old, **options)
    want = run(reference, *map(double, (x, weight, b, ids, mask, advantages, ref, old)), **options)
    for a, t in zip((got[0], got[3], got[4]), (want[0], want[3], want[4]), strict=True):
        torch.testing.assert_close(a.double(), t, rtol=1e-4, atol=1e-6)


@on_devices
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_masked_tokens(loss_type, level, device):
    """Masked positions may hold any id, and have no part in anything but luspo's sum; all may be masked."""
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs(device=device)
    options = {"loss_type": loss_type, "level": level, "beta": 0.1, "max_completion_length": 9}
    if loss_type != "luspo":
        strange = [torch.where(mask != 0, t, bad) for t, bad in ((ids, -100), (ref, float("nan")), (old, float("nan")))]
        want = run(ours, x, weight, b, ids, mask, advantages, ref, old, **options)
        got = run(ours, x, weight, b, strange[0], mask, advantages, *strange[1:], **options)
        for a, t in zip(got, want, strict=True):
            assert (a is None and t is None) or torch.equal(a, t)
        assert not got[3][mask == 0].any()
    got = run(ours, x, weight, b, ids, torch.zeros_like(mask), advantages, ref, old, **options)
    for t in got:
        assert t is None or not t.any()


@on_devices
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.bfloat16])
def test_masks_of_any_dtype(kind, device):
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs(device=device)
    for loss_type, level in LEVELS:
        options = {"loss_type": loss_type, "level": level, "beta": 0.1, "max_completion_length": 9}
        want = run(ours, x, weight, b, ids, mask, advantages, ref, old, **options)
        got = run(ours, x, weight, b, ids, mask.to(kind), advantages, ref, old, **options)
        torch.testing.assert_close(got[:5], want[:5])


@on_devices
@pytest.mark.parametrize("loss_type, level", [("dapo", "token"), ("grpo", "sequence")])
def test_frozen_tensors(loss_type, level, device):
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs(device=device, bias=True)
    arguments = (x, weight, b, ids, mask, advantages, ref, old)
    want = run(ours, *arguments, loss_type=loss_type, level=level, beta=0.1)
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        got = run(ours, *arguments, wanted=wanted, loss_type=loss_type, level=level, beta=0.1)
        for a, t, w in zip(got[3:], want[3:], wanted, strict=True):
            assert (a is None) != w
            if w:
                torch.testing.assert_close(a, t)
    evaluated = ours(x, weight, ids, mask, advantages, b, ref, old, loss_type=loss_type, level=level, beta=0.1)
    with torch.no_grad():
        again = ours(x.clone().requires_grad_(), weight, ids, mask, advantages, b, ref, old, loss_type=loss_type, level=level, beta=0.1)
    for r in (evaluated, again):
        assert not r[0].requires_grad
        torch.testing.assert_close(list(r), want[:3])


@on_devices
def test_slices_and_narrow_ids(device):
    """What trainers pass: views of the model's hidden states."""
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs((4, 10, 24, 61), device=device)
    leaf = x.clone().requires_grad_()
    arguments = (ids[:, 1:].to(torch.int32), mask[:, 1:], advantages, None, ref[:, 1:], old[:, 1:])
    loss = ours(leaf[:, :-1], weight.mT.contiguous().mT, *arguments, beta=0.1)[0]
    loss.backward()
    copied = x[:, :-1].contiguous().requires_grad_()
    want = ours(copied, weight, *(t if t is None else t.contiguous() for t in arguments), beta=0.1)[0]
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(leaf.grad[:, :-1], copied.grad)
    assert not leaf.grad[:, -1].any()


@on_devices
@pytest.mark.parametrize("loss_type, level", [("dapo", "token"), ("grpo", "sequence"), ("vespo", "token"), ("luspo", "token")])
def test_reference_model(loss_type, level, device):
    """Log-probabilities of the reference model given, made from its hidden states, or missing (KL 0)."""
    x, weight, ids, mask, advantages, b, _, old, _ = inputs(device=device, bias=True)
    ref_x, ref_weight = torch.randn(4, 9, 12, device=device), torch.randn(61, 12, device=device)
    ref = log_probs(ref_x, ref_weight, ids, b, 0.7)
    module = LigerFusedLinearGRPOLoss(beta=0.1, loss_type=loss_type, importance_sampling_level=level, temperature=0.7)
    given = module(x, weight, ids, mask, advantages, b, ref, old)
    made = module(x, weight, ids, mask, advantages, b, None, old, ref_x, ref_weight, b)
    torch.testing.assert_close(given, made)
    with pytest.warns(UserWarning, match="ref_per_token_logps are used"):
        both = module(x, weight, ids, mask, advantages, b, ref, old, ref_x, ref_weight, b)
    torch.testing.assert_close(both, given)
    with pytest.raises(AssertionError, match="use_ref_model"):
        module(x, weight, ids, mask, advantages, b, None, old)
    module.use_ref_model = False
    assert module(x, weight, ids, mask, advantages, b, None, old)[1][0] == 0


@on_devices
def test_second_backward_and_derivative(device):
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs(device=device)
    leaf = x.clone().requires_grad_()
    loss = ours(leaf, weight, ids, mask, advantages, b, ref, old, beta=0.1)[0]
    first, second = (torch.autograd.grad(loss, leaf, torch.tensor(u, device=device), retain_graph=True)[0] for u in (1.0, 3.0))
    torch.testing.assert_close(3 * first, second)
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="its gradient has no derivative"):
        grad.sum().backward()


@on_devices
def test_backward_does_not_need_the_weight(device):
    """ZeRO-3: the weight is whole during forward alone."""
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs(device=device)
    for loss_type, level in LEVELS:
        options = {"loss_type": loss_type, "level": level, "beta": 0.1, "max_completion_length": 9}
        want = run(ours, x, weight, b, ids, mask, advantages, ref, old, **options)
        leaf, head = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = ours(leaf, head, ids, mask, advantages, b, ref, old, **options)[0]
        head.data = torch.empty(0, device=device)
        (1.7 * loss).backward(inputs=[leaf])
        torch.testing.assert_close(leaf.grad, want[3])


@on_devices
def test_autocast(device):
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs(device=device, bias=True)
    kind = torch.device(device).type
    with torch.autocast(kind, torch.bfloat16):
        got = run(ours, x, weight, b, ids, mask, advantages, ref, old, beta=0.1)
    want = run(ours, x.bfloat16(), weight.bfloat16(), b.bfloat16(), ids, mask, advantages, ref, old, beta=0.1)
    for a, t in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, t.float(), rtol=2e-2, atol=1e-4)


@on_devices
@pytest.mark.parametrize("chunks", [False, True])
def test_fp16_gradients_of_a_mean_over_many_tokens(chunks, device, monkeypatch):
    """Coefficients of a mean fall below the smallest fp16 number; the gradients do not vanish."""
    monkeypatch.setattr(grpo_loss, "_in_chunks", lambda *_: chunks)
    x, weight, ids, mask, advantages, b, ref, _, _ = inputs((4, 500, 16, 61), torch.float16, device)
    for loss_type, level in (("dapo", "token"), ("grpo", "sequence")):
        arguments = (ids, mask, advantages / 1000, ref, None)  # ratios of 1: none at the edge of clipping, where a rounding decides
        got = run(ours, x, weight, b, *arguments, upstream=4096.0, loss_type=loss_type, level=level)
        want = run(reference, *map(double, (x, weight, b, *arguments)), upstream=4096.0, loss_type=loss_type, level=level)
        for a, t in zip(got[3:5], want[3:5], strict=True):
            assert float((a.double() - t).norm() / t.norm()) < 5e-3


def test_python_formula_is_the_same():
    """ppo_loss_fn, in whole and in parts of the batch, against the definition."""
    for option, (loss_type, level) in ((o, t) for o in OPTIONS for t in LEVELS):
        options = OPTIONS[option] | {"loss_type": loss_type, "level": level, "max_completion_length": 17}
        if loss_type not in CLIPPED and "delta" in options:
            continue
        *_, mask, advantages, _, ref, old, ratio = map(double, inputs(bias=True, **options))
        options["importance"] = ratio
        tau, vespo = options.get("tau", (1.0, 1.05)), options.get("vespo", (2.0, 3.0, 3.0, 2.0))
        logp = (old + 0.2 * torch.randn_like(old)).requires_grad_()
        want = loss_of(logp, mask, advantages, ref, old, **options)
        expected = torch.autograd.grad(want[0], logp)[0]
        for step in (4, 1):
            total, gradient = 0, torch.zeros_like(logp)
            for i in range(0, 4, step):
                s = slice(i, i + step)
                part = logp[s].detach().requires_grad_()
                loss, metrics = LigerFusedLinearGRPOFunction.ppo_loss_fn(
                    part, mask[s], advantages[s], mask, ref[s], old[s], options.get("epsilon_low", 0.2), options.get("epsilon_high", 0.2),
                    options.get("beta", 0.0), loss_type, 17, level, *tau, vllm_is_ratio=None if ratio is None else ratio[s],
                    delta=options.get("delta"), use_bias_correction_kl=options.get("bias_correction", False), vespo_k_pos=vespo[0],
                    vespo_lambda_pos=vespo[1], vespo_k_neg=vespo[2], vespo_lambda_neg=vespo[3], num_items_in_batch=None)
                assert len(metrics) == (2 if options.get("beta") else 1)
                total = total + loss.detach()
                gradient[s] = torch.autograd.grad(loss, part)[0]
            torch.testing.assert_close(total, want[0].detach(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@on_devices
def test_subclass_with_its_own_loss(device):
    class Mine(LigerFusedLinearPPOBase):
        @staticmethod
        def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, beta=0.0, **options):
            loss = -(per_token_logps * advantages[:, None] * attention_mask).sum() / full_attention_mask.sum() * (1 + beta)
            return loss, [per_token_logps.mean()]

        @classmethod
        def forward(cls, ctx, _input, weight, ids, mask, advantages, bias=None):
            return super().forward(cls=cls, ctx=ctx, _input=_input, weight=weight, selected_token_ids=ids, attention_mask=mask,
                                   advantages=advantages, bias=bias, beta=0.5, temperature=0.7)

        @staticmethod
        def backward(ctx, *grad_output):
            return LigerFusedLinearPPOBase.backward(ctx, *grad_output)

    class Changed(LigerFusedLinearGRPOFunction):
        @staticmethod
        def ppo_loss_fn(per_token_logps, **options):
            return per_token_logps.square().mean(), []

    x, weight, ids, mask, advantages, b, _, _, _ = inputs(device=device, bias=True)
    logp = log_probs(*map(double, (x, weight, ids, b)), 0.7)
    got = x.clone().requires_grad_()
    loss, metrics = Mine.apply(got, weight, ids, mask, advantages, b)
    loss.backward()
    want = x.double().requires_grad_()
    exact = -1.5 * (log_probs(want, *map(double, (weight, ids, b)), 0.7) * advantages[:, None] * mask).sum() / mask.sum()
    exact.backward()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics[0].double(), logp.mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-6)
    loss, metrics = Changed.apply(x, weight, ids, mask, advantages, b, None, None, None, None, None, 0.0, 0.2, 0.2, "dapo", None, "token",
                                  1.0, 1.05, 0.7, True, False)
    torch.testing.assert_close(loss.double(), logp.square().mean(), rtol=1e-5, atol=1e-6)
    assert metrics == ()
    with pytest.raises(NotImplementedError, match="ppo_loss_fn"):
        LigerFusedLinearPPOBase.ppo_loss_fn()
    chunk = LigerFusedLinearPPOBase.chunk_forward(x, weight, ids, b, 0.7)
    torch.testing.assert_close(chunk.double(), logp, rtol=1e-5, atol=1e-5)
    assert chunk.dtype == torch.float32
    assert float(LigerFusedLinearPPOBase._compute_dapo_normalizer(torch.zeros(2, 3))) == 1
    assert float(LigerFusedLinearPPOBase._compute_dapo_normalizer(mask, 12)) == 12


@on_devices
def test_functional_and_chunk_size(device):
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs(device=device)
    want = LigerFusedLinearGRPOLoss(loss_type="bnpo")(x, weight, ids, mask, advantages, b, ref, old)
    for chunk_size in (1, 2, 100):
        got = liger_fused_linear_grpo(x, weight, ids, mask, advantages, b, ref, old, None, None, None, 0.04, 0.2, 0.2, "bnpo", None,
                                      "token", 1.0, 1.05, 1.0, False, True, chunk_size)
        torch.testing.assert_close(got, want)
    one = LigerFusedLinearGRPOLoss(loss_type="bnpo")(x, weight, ids, mask, advantages[:, None], b, ref, old)
    torch.testing.assert_close(one, want)


@on_devices
@pytest.mark.parametrize("loss_type, level", [("dapo", "token"), ("grpo", "sequence"), ("vespo", "token"), ("luspo", "token")])
def test_compile(loss_type, level, device):
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs(device=device)
    module = LigerFusedLinearGRPOLoss(loss_type=loss_type, importance_sampling_level=level)

    def step(x, weight):
        loss, metrics = module(x * 1.5, weight, ids, mask, advantages, b, ref, old)
        return loss, metrics[0], metrics[1]

    got, want = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    a, e = torch.compile(step, fullgraph=True)(*got), step(*want)
    torch.testing.assert_close(a, e)
    a[0].backward()
    e[0].backward()
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.grad, w.grad, rtol=1e-4, atol=1e-6)


def test_helpers():
    p, q = torch.randn(5), torch.randn(5)
    torch.testing.assert_close(k3_loss_fn(p, q), torch.exp(p - q) - (p - q) - 1)
    torch.testing.assert_close(sapo_loss_fn(torch.tensor([1.0, 2.0]), 2.0), torch.sigmoid(torch.tensor([0.0, 2.0])) * 2)
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature"):
            sapo_loss_fn(p, temperature)
    r = torch.tensor([0.5, 1.0, 1.5], requires_grad=True)
    clipped, below, above = clip_coef_fn(r, 0.2, 0.3, "grpo")
    torch.testing.assert_close(clipped, torch.tensor([0.8, 1.0, 1.3]))
    assert below.tolist() == [True, False, False] and above.tolist() == [False, False, True] and clipped.requires_grad
    clipped, below, above = clip_coef_fn(r, 0.2, 1.2, "cispo")
    torch.testing.assert_close(clipped, torch.tensor([0.5, 1.0, 1.2]))
    assert not below.any() and above.tolist() == [False, False, True] and not clipped.requires_grad
    for loss_type in ("sapo", "vespo"):
        clipped, below, above = clip_coef_fn(r, 0.2, 0.2, loss_type)
        assert clipped is None and not below.any() and not above.any()
    assert get_gamma_weights(torch.ones(3), torch.zeros(3, 4), torch.ones(3, 4)).tolist() == [[1.0]] * 3  # phi(1) = 1


def test_errors():
    x, weight, ids, mask, advantages, b, ref, old, _ = inputs()

    def call(error, match, **changes):
        a = {"x": x, "weight": weight, "ids": ids, "mask": mask, "advantages": advantages, "ref": ref, "old": old} | changes
        with pytest.raises(error, match=match):
            ours(a.pop("x"), a.pop("weight"), a.pop("ids"), a.pop("mask"), a.pop("advantages"), None, a.pop("ref"), a.pop("old"), **a)

    for loss_type in ("cispo", "sapo", "vespo"):
        call(ValueError, "sequence level", loss_type=loss_type, level="sequence")
    call(ValueError, "unknown importance_sampling_level", level="batch")
    call(ValueError, "unknown loss_type", loss_type="ppo")
    call(AssertionError, "max_completion_length", loss_type="dr_grpo")
    call(AssertionError, "out of bounds", ids=ids + 61)
    for loss_type in ("dapo", "luspo"):  # the mask says what counts, no id does
        call(AssertionError, "-100 is out of bounds", ids=torch.full_like(ids, -100), loss_type=loss_type)
    for ratio in (torch.ones(4, 4), torch.ones(1, 9), torch.ones(9), torch.ones(4, 9, 1), torch.tensor(1.0)):
        call(AssertionError, "vllm_is_ratio", importance=ratio)
    call(ValueError, "attention_mask", mask=mask[:, 1:])
    call(ValueError, "selected_token_ids", ids=ids[:3])
    call(ValueError, "advantages", advantages=torch.ones(4, 9))
    call(ValueError, "old_per_token_logps", old=old[0])
    call(ValueError, "temperature", temperature=0.0)
    call(ValueError, "weight", weight=weight[:, :-1])
    with pytest.raises(ValueError, match="dr_grpo"):
        LigerFusedLinearGRPOFunction.ppo_loss_fn(old, mask, advantages, mask, loss_type="dr_grpo")
    for options in ({"sapo_temperature_pos": 0.0}, {"sapo_temperature_neg": -1.0}, {"delta": 0.0}, {"delta": -2.0}):
        with pytest.raises(ValueError, match="positive"):
            LigerFusedLinearGRPOLoss(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "loss_type='dapo'" in repr(LigerFusedLinearGRPOLoss())


@on_devices
def test_no_sequences(device):
    for shape in ((0, 3, 8, 11), (2, 0, 8, 11)):
        x, weight, ids, mask, advantages, b, ref, old, _ = inputs(shape, device=device)
        for loss_type, level in LEVELS:
            got = run(ours, x, weight, b, ids, mask, advantages, ref, old, loss_type=loss_type, level=level, beta=0.1,
                      max_completion_length=3)
            assert got[0] == 0 and not got[4].any()
