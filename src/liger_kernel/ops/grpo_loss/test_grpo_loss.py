"""grpo_loss on logits against fp64: every loss type, level and option, masks, upstream gradients, reductions, in place, errors."""

import itertools

import pytest
import torch

from liger_kernel.core.accuracy import CORE_ERROR, assert_accurate, devices
from liger_kernel.ops.grpo_loss import GrpoLossFunction, _masked_mean, _reduce_grpo_loss, triton_grpo_loss
from liger_kernel.ops.grpo_loss.cases import CLIPPED, DTYPES, OPTIONS, SHAPES, TYPES, inputs, logp_error, term_bounds
from liger_kernel.ops.grpo_loss.ref import log_probs, per_token, reduced, reference
from liger_kernel.ops.selective_log_softmax import cases as select

on_devices = pytest.mark.parametrize("device", devices())
LEVELS = [(t, "token") for t in TYPES] + [(t, "sequence") for t in CLIPPED]


def double(t):
    return t.double() if t is not None and t.is_floating_point() else t


def ours(logits, ids, mask, advantages, ref, old, *, temperature=1.0, loss_type="grpo", level="token", epsilon_low=0.2, epsilon_high=0.2,
         beta=0.0, delta=None, bias_correction=False, tau=(1.0, 1.05), importance=None, vespo=(2.0, 3.0, 3.0, 2.0), inplace=False, **more):
    return triton_grpo_loss(
        logits, old, ref, ids, advantages, mask, temperature, beta, epsilon_low, epsilon_high, inplace, loss_type,
        importance_sampling_level=level, sapo_temperature_pos=tau[0], sapo_temperature_neg=tau[1], vllm_is_ratio=importance, delta=delta,
        use_bias_correction_kl=bias_correction, vespo_k_pos=vespo[0], vespo_lambda_pos=vespo[1], vespo_k_neg=vespo[2],
        vespo_lambda_neg=vespo[3], **more)


def check(shape, dtype, device, loss_type, level, option, temperature=1.0, old=True, against_eager=True):
    options = OPTIONS[option] | {"loss_type": loss_type, "level": level}
    if loss_type not in CLIPPED:
        options.pop("delta", None)
    logits, ids, mask, advantages, ref, old_logp, importance = inputs(shape, dtype, device, **options)
    options["importance"] = importance
    old_logp = old_logp if old else None
    up = torch.randn(ids.shape, generator=torch.Generator().manual_seed(4)).to(device) / 3

    def run(function, dtype):
        leaf = logits.to(dtype).requires_grad_()
        loss, kl, clipped = function(leaf)
        (grad,) = torch.autograd.grad(loss, leaf, up.to(loss.dtype))
        return loss.detach(), kl, clipped, grad

    got = run(lambda x: ours(x, ids, mask, advantages, ref, old_logp, temperature=temperature, **options), dtype)
    wide = {k: double(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    want = run(lambda x: reference(x, ids, *map(double, (mask, advantages, ref, old_logp)), temperature, **wide), torch.float64)
    eager = run(lambda x: reference(x.float(), ids, mask, advantages, ref, old_logp, temperature, **options), dtype)

    if not against_eager:
        eager = [None] * 4
    logp, error = log_probs(logits.double(), ids, mask, temperature), logp_error(logits, ids, mask, temperature)
    extra = {"vespo": True} if loss_type == "vespo" else {"vespo": None}
    loss_bound, slope_bound = term_bounds(logp, error, mask, advantages, ref, old_logp, **(options | extra))
    assert_accurate(got[0], want[0], loss_bound, eager[0], "loss")
    if options.get("beta"):
        assert_accurate(got[1], want[1], loss_bound / options["beta"], None, "kl")
    else:
        assert got[1] is None
    assert torch.equal(got[2].double(), want[2])
    # dz = d_logp (hot - p) / T
    leaf = logp.clone().requires_grad_()
    loss = per_token(leaf, mask.double(), advantages.double(), double(ref), double(old_logp), **wide)[0]
    slope = torch.autograd.grad((torch.where(mask != 0, loss.expand_as(leaf), 0) * up.double()).sum(), leaf)[0]
    target = torch.where(mask != 0, ids, -100)
    bound = torch.zeros(logits.shape, dtype=torch.float64, device=device)
    bound[:, :-1] = select.Bounds(logits[:, :-1], target, temperature, slope.abs() + slope_bound).grad
    spread = slope_bound * (up.abs().double().amax() * (1 if level == "token" else 2))
    z = torch.softmax(logits[:, :-1].double() / temperature, -1)
    hot = torch.zeros_like(z).scatter_(-1, ids[..., None], 1.0)
    bound[:, :-1] += (mask * spread)[..., None] * (z + hot) / temperature
    assert got[3].dtype == dtype
    # A sequence has one slope, whose single rounding decides both errors: chance says which of the two is larger.
    assert_accurate(got[3], want[3], bound, eager[3] if level == "token" else None, "gradient")
    assert not got[3][:, -1].any()


@on_devices
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_every_type(loss_type, level, option, device):
    check((6, 60, 129), torch.float32, device, loss_type, level, option)  # tokens enough for the largest errors to be typical


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss_type, level", [("grpo", "token"), ("luspo", "sequence"), ("cispo", "token"), ("vespo", "token")])
def test_shapes_and_types(shape, dtype, loss_type, level, device):
    # in fp32 the largest errors of a few tokens say nothing about either
    check(shape, dtype, device, loss_type, level, "kl", temperature=0.9, against_eager=dtype != torch.float32)


@on_devices
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_without_old_log_probs(loss_type, level, device):
    """The ratio is 1, with a gradient."""
    check((4, 7, 97), torch.float32, device, loss_type, level, "kl", old=False)


@on_devices
@pytest.mark.parametrize("loss_type, level", LEVELS)
@pytest.mark.parametrize("more", [{}, {"max_completion_length": 11}, {"num_items_in_batch": 5}, {"num_items_in_batch": torch.tensor(40.0)}])
def test_reductions(loss_type, level, more, device):
    logits, ids, mask, advantages, ref, old, _ = inputs((4, 7, 97), torch.float32, device)
    got, want = logits.clone().requires_grad_(), logits.double().requires_grad_()
    options = {"loss_type": loss_type, "level": level, "beta": 0.1}
    loss, (kl, clip) = ours(got, ids, mask, advantages, ref, old, reduce=True, **options, **more)
    (loss * 3).backward()
    terms = reference(want, ids, *map(double, (mask, advantages, ref, old)), **options)
    truth = reduced(terms[0], mask.double(), loss_type, more.get("max_completion_length"), more.get("num_items_in_batch"))
    (truth * 3).backward()
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(kl.double(), terms[1].sum() / mask.sum(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(clip.double(), terms[2].sum() / mask.sum())
    for t in (loss, kl, clip):
        assert t.dtype == torch.float32 and t.dim() == 0
    assert not kl.requires_grad and not clip.requires_grad
    tokens = ours(logits, ids, mask, advantages, ref, old, **options)
    again = _reduce_grpo_loss(tokens[0], mask, loss_type, more.get("max_completion_length"), more.get("num_items_in_batch"))
    torch.testing.assert_close(again, loss.detach())
    torch.testing.assert_close(_masked_mean(tokens[1], mask), kl)


@on_devices
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_masked_tokens(loss_type, level, device):
    """C: what lies at masked positions matters to nobody, and they get no gradient; all may be masked."""
    logits, ids, mask, advantages, ref, old, _ = inputs((3, 5, 41), torch.float32, device)
    mask[0, 1:] = 0
    spoilt = logits.clone()
    spoilt[:, :-1][mask == 0] = float("nan")
    bad = [torch.where(mask != 0, t, float("nan")) for t in (ref, old)]
    up = torch.where(mask != 0, torch.rand_like(mask), float("nan"))
    grads = []
    for x, r, o, g in ((logits, ref, old, up.nan_to_num(0)), (spoilt, *bad, up)):
        leaf = x.clone().requires_grad_()
        loss, kl, _ = ours(leaf, ids, mask, advantages, r, o, loss_type=loss_type, level=level, beta=0.1)
        grads.append((loss, kl, *torch.autograd.grad(loss, leaf, g)))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
    assert not grads[0][2][:, :-1][mask == 0].any() and not grads[0][0][mask == 0].any()
    for reduce in (False, True):
        leaf = logits.clone().requires_grad_()
        loss = ours(leaf, ids, torch.zeros_like(mask), advantages, ref, old, loss_type=loss_type, level=level, beta=0.1, reduce=reduce)[0]
        loss.sum().backward()
        assert not loss.any() and not leaf.grad.any()


@on_devices
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.bfloat16, None])
def test_masks(kind, device):
    logits, ids, mask, advantages, ref, old, _ = inputs((3, 5, 41), torch.float32, device)
    if kind is None:
        mask = torch.ones_like(mask)
    want = ours(logits, ids, mask, advantages, ref, old, loss_type="bnpo", reduce=True, beta=0.1)
    got = ours(logits, ids, None if kind is None else mask.to(kind), advantages, ref, old, loss_type="bnpo", reduce=True, beta=0.1)
    torch.testing.assert_close(got, want)


@on_devices
def test_overflowing_ratio_is_clipped(device):
    """A ratio of e^100 is infinite in fp32; clipped, it has no gradient (eager code: 0 * inf)."""
    logits, ids, mask, advantages, ref, old, _ = inputs((3, 5, 41), torch.float32, device)
    for loss_type, level in LEVELS:
        leaf = logits.clone().requires_grad_()
        loss = ours(leaf, ids, mask, advantages.abs(), ref, old - 100, loss_type=loss_type, level=level)[0]
        loss.sum().backward()
        assert bool(loss.isfinite().all()) and bool(leaf.grad.isfinite().all()), loss_type


@on_devices
def test_in_place(device):
    logits, ids, mask, advantages, ref, old, _ = inputs((3, 5, 41), torch.bfloat16, device)

    def step(inplace, retain=False):
        leaf = logits.clone().requires_grad_()
        inner = leaf * 1
        loss = ours(inner, ids, mask, advantages, ref, old, beta=0.1, reduce=True, inplace=inplace)[0]
        loss.backward(retain_graph=retain)
        return leaf, inner, loss

    leaf, inner, _ = step(False)
    want = leaf.grad
    assert torch.equal(inner.detach(), logits)
    leaf, inner, _ = step(True)
    assert torch.equal(leaf.grad, want) and torch.equal(inner.detach(), want)
    leaf, inner, loss = step(True, retain=True)
    assert torch.equal(inner.detach(), logits)
    loss.backward()
    torch.testing.assert_close(leaf.grad, 2 * want)
    leaf = logits.clone().requires_grad_()  # a leaf keeps its values
    ours(leaf, ids, mask, advantages, ref, old, beta=0.1, reduce=True, inplace=True)[0].backward()
    assert torch.equal(leaf.grad, want) and torch.equal(leaf.detach(), logits)


@on_devices
def test_frozen_and_no_grad(device):
    logits, ids, mask, advantages, ref, old, _ = inputs((3, 5, 41), torch.float32, device)
    want = ours(logits.clone().requires_grad_(), ids, mask, advantages, ref, old, beta=0.1, reduce=True)
    assert want[0].requires_grad
    got = ours(logits, ids, mask, advantages, ref, old, beta=0.1, reduce=True)
    with torch.no_grad():
        again = ours(logits.clone().requires_grad_(), ids, mask, advantages, ref, old, beta=0.1, reduce=True)
    for r in (got, again):
        assert not r[0].requires_grad
        torch.testing.assert_close(r, want, check_device=True)


@on_devices
def test_vespo_weights_given(device):
    """phi_seq of the raw form, which is what the wrapper makes from the log-probabilities; a ratio a sequence counts once."""
    logits, ids, mask, advantages, ref, old, ratio = inputs((4, 6, 41), torch.float32, device, importance="sequences")
    from liger_kernel.ops.grpo_loss.terms import get_gamma_weights

    logp = log_probs(logits, ids, mask)
    log_ratio = torch.where(mask != 0, logp - old, 0)
    want = ours(logits, ids, mask, advantages, ref, old, loss_type="vespo", importance=ratio)[0]
    for shaped in (ratio, ratio[:, None]):
        phi = get_gamma_weights(advantages, log_ratio, mask, shaped)
        assert phi.shape == (4, 1)
        for given in (phi, phi.view(-1)):
            got = GrpoLossFunction.apply(logits, old, ref, ids, advantages, mask, 1.0, 0.0, 0.2, 0.2, False, "vespo", None, False, "token",
                                         1.0, 1.05, None, None, False, None, given)[0]
            torch.testing.assert_close(got, want)


@on_devices
def test_compile(device):
    logits, ids, mask, advantages, ref, old, _ = inputs((3, 5, 41), torch.float32, device)
    for loss_type, level in (("grpo", "token"), ("luspo", "sequence"), ("vespo", "token")):
        def step(x, loss_type=loss_type, level=level):
            return ours(x * 1.5, ids, mask, advantages, ref, old, loss_type=loss_type, level=level, beta=0.1, reduce=True, inplace=True)[0]

        got, want = (logits.clone().requires_grad_() for _ in range(2))
        torch.compile(step, fullgraph=True)(got).backward()
        step(want).backward()
        torch.testing.assert_close(got.grad, want.grad)


def test_large_batches_of_tokens():
    """C43: completions of 65536 tokens and more."""
    logits, ids, mask, advantages, ref, old, _ = inputs((1, 70000, 3), torch.float32)
    leaf = logits.requires_grad_()
    loss = ours(leaf, ids, mask, advantages, ref, old, reduce=True, beta=0.1)[0]
    loss.backward()
    truth = reduced(reference(logits.double(), ids, *map(double, (mask, advantages, ref, old)), beta=0.1)[0], mask.double(), "grpo")
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-6)
    assert bool(leaf.grad[0, -2].any()) == bool(mask[0, -1])


def test_errors():
    logits, ids, mask, advantages, ref, old, _ = inputs((3, 5, 41), torch.float32)

    def call(error, match, **changes):
        before = logits.clone()
        a = {"logits": logits, "ids": ids, "mask": mask, "advantages": advantages, "ref": ref, "old": old} | changes
        with pytest.raises(error, match=match):
            ours(a.pop("logits"), a.pop("ids"), a.pop("mask"), a.pop("advantages"), a.pop("ref"), a.pop("old"), **a)
        assert torch.equal(before, logits)

    wide = torch.zeros(3, 10)
    for name, t in (("logits", torch.zeros(3, 6, 50)[..., :41]), ("old", wide[:, ::2]), ("ref", wide[:, ::2]), ("mask", wide[:, ::2]),
                    ("ids", wide.long()[:, ::2])):
        call(AssertionError, "contiguous", **{name: t}, beta=0.1)
    call(AssertionError, "ref_logp is None", ref=None, beta=0.1)
    call(AssertionError, "importance_sampling_level", level="batch")
    for ratio in (torch.ones(3, 4), torch.ones(1, 5), torch.ones(5), torch.ones(3, 5, 1)):
        call(AssertionError, "vllm_is_ratio", importance=ratio)
    call(AssertionError, "are needed", ids=None)
    call(AssertionError, "out of bounds", ids=ids + 41)
    call(AssertionError, "-100 is out of bounds", ids=torch.full_like(ids, -100))  # the mask says what counts, no id does
    call((RuntimeError, ValueError), "grpo_loss: takes fp32, bf16 and fp16", logits=logits.double())
    call(ValueError, "unknown loss_type", loss_type="ppo")
    for loss_type in ("cispo", "sapo", "vespo"):
        call(ValueError, "delta", loss_type=loss_type, delta=2.0)
        call(ValueError, "sequence level", loss_type=loss_type, level="sequence")
    for tau in itertools.product((0.0, -1.0, 1.0), repeat=2):
        if tau != (1.0, 1.0):
            call(ValueError, "sapo temperatures", loss_type="sapo", tau=tau)
    call(ValueError, "ids", ids=ids[:, :-1].contiguous())
    call(ValueError, "advantages", advantages=advantages[:2])
    call(ValueError, "temperature", temperature=0.0)
    call(CORE_ERROR, "fp32, bf16 and fp16", logits=logits.double())
    arguments = (logits, old, ref, ids, advantages, mask, 1.0, 0.0, 0.2, 0.2, False, "vespo")
    with pytest.raises(ValueError, match="phi_seq"):
        GrpoLossFunction.apply(*arguments)
    with pytest.raises(AssertionError, match="phi_seq"):
        GrpoLossFunction.apply(*arguments, None, True, "token", 1.0, 1.05, None, None, False, None, torch.ones(4))
