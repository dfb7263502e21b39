"""The preference losses inside autograd, autocast and torch.compile; memory, frozen and strided tensors, subclasses."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import liger_kernel.chunked_loss as chunked_loss
from liger_kernel.chunked_loss import functional, ref, sequences
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.fused_linear_unpaired_preference import LigerFusedLinearUnpairedPreferenceBase
from liger_kernel.chunked_loss.preference_cases import KTO, PAIRED, gradients, make, ours, plain
from liger_kernel.chunked_loss.test_preference import every_loss, on_devices, way  # noqa: F401 - a fixture
from liger_kernel.core.accuracy import UNIT_ROUNDOFF
from liger_kernel.ops.fused_linear_log_probs.test_autograd import peak_bytes

LOSSES = PAIRED | KTO
SOME = ["dpo sigmoid", "simpo with nll", "orpo", "kto"]
some_losses = pytest.mark.parametrize("name", SOME)


@on_devices
@some_losses
def test_upstream_gradients(name, device, way):  # noqa: F811
    """Of 3, twice through a kept graph, and in place at the end: nothing compounds; metrics hold no graph."""
    loss = LOSSES[name]
    batch = make(loss, torch.float32, device).to()
    value, metrics = ours(loss, batch)
    assert not any(m.requires_grad for m in metrics)
    first = torch.autograd.grad(value, batch.trained(), retain_graph=True)
    again = torch.autograd.grad(value, batch.trained(), torch.tensor(3.0, device=device), retain_graph=True)
    last = torch.autograd.grad(-2 * value, batch.trained())
    for one, three, minus_two in zip(first, again, last, strict=True):
        torch.testing.assert_close(three, 3 * one)
        torch.testing.assert_close(minus_two, -2 * one)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


@on_devices
@some_losses
def test_second_derivative_is_refused(name, device):
    batch = make(LOSSES[name], torch.float32, device).to()
    graphed = torch.autograd.grad(ours(LOSSES[name], batch)[0], batch.trained(), create_graph=True)
    for asked in (batch.trained(), batch.trained()[:1]):
        with pytest.raises(RuntimeError, match="chunked_loss: its gradient has no derivative"):
            torch.autograd.grad(sum(g.pow(2).sum() for g in graphed), asked, retain_graph=True)


@on_devices
@some_losses
def test_each_gradient_only_where_required(name, device, way):  # noqa: F811
    """C90, departures 13 and 14: input, weight and bias independently; none of them: loss and metrics alone."""
    loss = LOSSES[name]
    full = make(loss, torch.float32, device).to()
    value, metrics = ours(loss, full)
    want = gradients(value, full)
    for mask in range(8):
        batch = make(loss, torch.float32, device).to(requires_grad=False)
        for i, t in enumerate(batch.trained()):
            t.requires_grad_(bool(mask >> i & 1))
        got, got_metrics = ours(loss, batch)
        torch.testing.assert_close((got, got_metrics), (value, metrics))
        assert got.requires_grad == bool(mask)
        if mask:
            got.backward()
        for i, t in enumerate(batch.trained()):
            assert (t.grad is not None) == bool(mask >> i & 1)
            if t.grad is not None:
                torch.testing.assert_close(t.grad, want[i])
    with torch.no_grad():
        got = ours(loss, full)
    assert not got[0].requires_grad
    torch.testing.assert_close(got, (value.detach(), metrics))


@on_devices
@some_losses
def test_memory(name, device):
    """C90: evaluation holds a tile, whatever the tensors' flags; a frozen head costs no V x H buffer; tiles hold no logits."""
    loss = LOSSES[name]
    length, hidden, vocab = (1024, 1024, 128000) if device != "cpu" else (128, 256, 60000)
    batch = make(loss, torch.bfloat16, device, 4, length, hidden, vocab, bias=False, ignored=False)
    logits, tile, slack = 4 * length * vocab * 4, (256 << 20) if device != "cpu" else (32 << 20), 30 << 20
    batch = batch.to()

    def evaluate():
        with torch.no_grad():
            return ours(loss, batch)

    assert peak_bytes(evaluate, device) < tile + slack < logits
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        for limit in ("_CUDA_BYTES", "_CPU_BYTES"):
            patch.setattr(sequences, limit, 0)
        batch.weight.requires_grad_(False)
        frozen = peak_bytes(lambda: torch.autograd.grad(ours(loss, batch)[0], batch.x), device)
        assert frozen < tile + slack + 16 * 4 * length * hidden
        batch.weight.requires_grad_(True)
        both = peak_bytes(lambda: torch.autograd.grad(ours(loss, batch)[0], (batch.x, batch.weight)), device)
        assert both < frozen + 2 * vocab * hidden + slack


@on_devices
@some_losses
def test_strided_tensors(name, device, way):  # noqa: F811
    """C23: slices as trainers pass them, of input, reference input, targets and weight; narrow integers as targets."""
    loss = LOSSES[name]
    want = make(loss, torch.float32, device).to()
    value, metrics = ours(loss, want)
    expected = gradients(value, want)
    whole = F.pad(want.x.detach(), (0, 0, 0, 1)).requires_grad_()
    wide = F.pad(want.weight.detach(), (2, 1)).requires_grad_()
    target = F.pad(want.target, (1, 0))[:, 1:]
    reference = want.reference
    if reference:
        reference = (F.pad(reference[0], (0, 0, 0, 1))[:, :-1], reference[1].mT.contiguous().mT, reference[2])
    batch = dataclasses.replace(want, x=whole[:, :-1], weight=wide[:, 2:-1], target=target.int(), reference=reference)
    got, got_metrics = ours(loss, batch)
    torch.testing.assert_close((got, got_metrics), (value, metrics))
    dx, dw = torch.autograd.grad(got, (whole, wide))
    torch.testing.assert_close(dx[:, :-1], expected[0])
    torch.testing.assert_close(dw[:, 2:-1], expected[1])
    assert not dx[:, -1].any() and not dw[:, :2].any()


@on_devices
@some_losses
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_mixed_dtypes(name, amp, head_dtype, x_dtype, device, way):  # noqa: F811
    """C91: products in autocast's dtype, else the wider one; gradients in each tensor's own."""
    loss = LOSSES[name]
    batch = make(loss, torch.bfloat16, device, length=20)
    batch = dataclasses.replace(batch, x=batch.x.to(x_dtype), weight=batch.weight.to(head_dtype), bias=batch.bias.to(head_dtype))
    if batch.reference:
        batch.reference = tuple(t.float() for t in batch.reference)
    copy, exact = batch.to(), batch.to(torch.float64)
    with torch.autocast(torch.device(device).type, dtype=amp or torch.bfloat16, enabled=amp is not None):
        value, metrics = ours(loss, copy)
    got = gradients(value, copy)
    true, true_metrics = plain(loss, exact)
    u = UNIT_ROUNDOFF[amp or torch.promote_types(x_dtype, head_dtype)]
    assert value.dtype == torch.float32 and all(m.dtype == torch.float32 for m in metrics)
    assert abs(float(value.detach()) - float(true.detach())) <= 60 * u * (1 + abs(float(true.detach())))
    for t, g, want in zip(copy.trained(), got, gradients(true, exact), strict=True):
        assert g.dtype == t.dtype
        assert (g.double() - want).norm() <= 40 * max(u, UNIT_ROUNDOFF[t.dtype]) * want.norm()


@on_devices
@some_losses
def test_chunk_size_and_compiled_change_nothing(name, device):
    loss = LOSSES[name]
    batch = make(loss, torch.float32, device)
    want = ours(loss, batch)
    for options in ({"chunk_size": 2}, {"chunk_size": 100}, {"compiled": False}):
        torch.testing.assert_close(ours(dataclasses.replace(loss, options=loss.options | options), batch), want, rtol=0, atol=0)


@on_devices
def test_chunks_are_several(device, monkeypatch):
    """More groups than fit into one chunk: parts of the loss and of the metrics come together in order, per-pair options are cut."""
    monkeypatch.setattr(sequences, "_CPU_BYTES_FP32", 1 << 40)
    for name in ("dpo sigmoid", "kto"):
        loss = LOSSES[name]
        batch = make(loss, torch.float32, device, sequences=12, length=400, vocab=300)
        if name == "kto":
            batch = dataclasses.replace(batch, kl=torch.rand(12, device=device))
        copy, exact = batch.to(), batch.to(torch.float64)
        value, metrics = ours(loss, copy)
        true, true_metrics = plain(loss, exact)
        torch.testing.assert_close(value.double(), true, rtol=1e-5, atol=1e-5)
        for got, want in zip(metrics, true_metrics, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-3)
        for got, want in zip(gradients(value, copy), gradients(true, exact), strict=True):
            assert (got.double() - want).norm() <= 1e-4 * want.norm()


@on_devices
@pytest.mark.parametrize("shape", [(), (1,), (6,)], ids=str)
def test_kl_shapes(shape, device, way):  # noqa: F811
    batch = make(KTO["kto"], torch.float32, device)
    batch = dataclasses.replace(batch, kl=torch.rand(shape, device=device))
    torch.testing.assert_close(ours(KTO["kto"], batch), plain(KTO["kto"], batch), rtol=1e-4, atol=1e-4)
    none = dataclasses.replace(batch, kl=None)
    torch.testing.assert_close(ours(KTO["kto"], none), plain(KTO["kto"], none), rtol=1e-4, atol=1e-4)


@on_devices
def test_kto_of_one_side(device, way):  # noqa: F811
    for side in (True, False):
        batch = make(KTO["kto"], torch.float32, device)
        batch.desirable.fill_(side)
        copy, exact = batch.to(), batch.to(torch.float64)
        value, metrics = ours(KTO["kto"], copy)
        true, true_metrics = plain(KTO["kto"], exact)
        torch.testing.assert_close(value.double(), true)
        assert all(float(m) == 0 for m in metrics[side::2])
        for g, w in zip(gradients(value, copy), gradients(true, exact), strict=True):
            torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-5)


@on_devices
def test_weight_of_an_adapter(device, way):  # noqa: F811
    """C45: a weight that is computed, W + B A, trains what it is made of."""
    loss = PAIRED["cpo"]
    batch = make(loss, torch.float32, device).to(requires_grad=False)
    a, b = torch.randn(4, 33, device=device, requires_grad=True), torch.randn(129, 4, device=device, requires_grad=True)
    got = torch.autograd.grad(ours(loss, dataclasses.replace(batch, weight=batch.weight + b @ a))[0], (a, b))
    want = torch.autograd.grad(plain(loss, dataclasses.replace(batch, weight=batch.weight + b @ a))[0], (a, b))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@on_devices
@every_loss
def test_compile(name, device):
    """C119: one graph, the values and gradients of the eager call."""
    loss = LOSSES[name]
    batch = make(loss, torch.float32, device)
    module = loss.module(**loss.options)
    reference = dict(zip(("ref_input", "ref_weight", "ref_bias"), batch.reference, strict=True)) if batch.reference else {}
    extra = {"preference_labels": batch.desirable, "kl": batch.kl} if loss.name == "kto" else {}

    def run(f):
        copy = batch.to()
        value, metrics = f(_input=copy.x * 1.5, lin_weight=copy.weight, target=copy.target, bias=copy.bias, **reference, **extra)
        assert not any(m.requires_grad for m in metrics)
        return value, metrics, gradients(value, copy)

    got = run(torch.compile(module, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(got, run(module), rtol=1e-4, atol=1e-5)


def test_inductor():
    loss = PAIRED["orpo"]
    batch = make(loss, torch.bfloat16, "cpu")
    module = loss.module(**loss.options)
    nll_target = torch.randint(129, batch.target.shape)
    results = []
    for f in (module, torch.compile(module, fullgraph=True)):
        copy = batch.to()
        value, metrics = f(copy.weight, copy.x, copy.target, copy.bias, nll_target)
        results.append((value, metrics, gradients(value, copy)))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


class SumOfMargins(LigerFusedLinearPreferenceBase):
    """A third party's loss, which looks at all pairs at once (it sorts the margins), and gives no metric."""

    @staticmethod
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1, weights=None):
        margins = (chosen_logps - rejected_logps).sort().values
        return (torch.tanh(beta * margins) * weights).sum() / (full_target.shape[0] // 2)

    @classmethod
    def forward(cls, ctx, _input, weight, target, bias=None, weights=None):
        return super().forward(cls=cls, ctx=ctx, _input=_input, weight=weight, target=target, bias=bias, beta=0.5, weights=weights,
                               compute_nll_loss=False, average_log_prob=False)

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], None


class Scored(LigerFusedLinearUnpairedPreferenceBase):
    """A third party's loss of single sequences, with a metric a sequence."""

    @staticmethod
    def preference_loss_fn(log_prob_chunk, preference_labels_chunk, full_target, ref_log_prob_chunk=None, scores=None):
        losses = -log_prob_chunk * scores * preference_labels_chunk
        return losses.sum() / full_target.shape[0], losses

    @classmethod
    def forward(cls, ctx, _input, weight, target, preference_labels, scores):
        return LigerFusedLinearUnpairedPreferenceBase.forward(cls, ctx, _input, weight, target, preference_labels, scores=scores,
                                                              average_log_prob=True)

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearUnpairedPreferenceBase.backward(ctx, *grad_output)[:4], None


@on_devices
def test_subclasses(device, way):  # noqa: F811
    batch = make(PAIRED["cpo"], torch.float32, device, bias=True)
    weights = torch.rand(3, device=device)
    copy, exact = batch.to(), batch.to(torch.float64)
    value, metrics = SumOfMargins.apply(copy.x, copy.weight, copy.target, copy.bias, weights)
    logps = ref.sequence_log_probs(exact.x, exact.weight, exact.target, exact.bias)[0]
    true = (torch.tanh(0.5 * (logps[:3] - logps[3:]).sort().values) * weights).mean()
    assert len(metrics) == 5
    torch.testing.assert_close(value.double(), true)
    for g, w in zip(gradients(value * 2, copy), gradients(true * 2, exact), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-5)

    batch = make(KTO["kto"], torch.float32, device, bias=False)
    copy, exact = batch.to(), batch.to(torch.float64)
    scores = torch.rand(6, device=device)
    value, metrics = Scored.apply(copy.x, copy.weight, copy.target, copy.desirable, scores)
    logps = ref.sequence_log_probs(exact.x, exact.weight, exact.target, average=True)[0]
    true = -(logps * scores * exact.desirable).mean()
    assert metrics[4].shape == (6,)
    torch.testing.assert_close(value.double(), true)
    for g, w in zip(gradients(value, copy), gradients(true, exact), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-5)


@on_devices
def test_overridden_preference_loss(device):
    """A subclass of a loss of ours that overrides the formula alone."""
    class Mine(chunked_loss.dpo_loss.LigerFusedLinearDPOFunction):
        @staticmethod
        def preference_loss_fn(chosen_logps, rejected_logps, full_target, ref_chosen_logps=None, ref_rejected_logps=None, **_):
            return (rejected_logps - chosen_logps + ref_chosen_logps).mean(), chosen_logps, rejected_logps

    batch = make(PAIRED["dpo sigmoid"], torch.float32, device).to()
    value, metrics = Mine.apply(batch.x, batch.weight, batch.target, batch.bias, *batch.reference)
    ref_chosen = ref.sequence_log_probs(batch.reference[0], batch.reference[1], batch.target, batch.reference[2])[0][:3]
    torch.testing.assert_close(value, (metrics[1] - metrics[0] + ref_chosen).mean())
    value.backward()
    assert batch.weight.grad.abs().max() > 0


@pytest.mark.parametrize("base", [LigerFusedLinearPreferenceBase, LigerFusedLinearUnpairedPreferenceBase])
def test_bases_have_no_loss(base):
    with pytest.raises(NotImplementedError):
        base.preference_loss_fn(1, 2)


@on_devices
@pytest.mark.parametrize("average", [False, True])
def test_chunk_forward(average, device):
    batch = make(PAIRED["cpo"], torch.float32, device)
    nll_target = torch.randint(129, (3, 7), device=device)
    got = LigerFusedLinearPreferenceBase.chunk_forward(
        batch.x, batch.weight, batch.target, batch.bias, chosen_nll_target_chunk=nll_target, average_log_prob=average)
    logps, logits = ref.sequence_log_probs(batch.x, batch.weight, batch.target, batch.bias, average=average)
    nll = -ref.picked(logits[:3], nll_target).sum()
    torch.testing.assert_close(got, (logps[:3], logps[3:], logits[:3], logits[3:], nll))


@on_devices
@some_losses
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
def test_nothing(name, shape, device, way):  # noqa: F811
    """C56: no sequences, no positions."""
    batch = make(LOSSES[name], torch.float32, device, *shape, ignored=False).to()
    value, metrics = ours(LOSSES[name], batch)
    assert value.isfinite()
    grads = gradients(value, batch)
    assert grads[0].shape == batch.x.shape and not grads[1].any() and not grads[2].any()


SIGNATURES = {
    "dpo": "_input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100, beta=0.1, "
           "compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1, loss_type='sigmoid', "
           "label_smoothing=0.0, discopop_tau=0.05, alpha=1.0",
    "orpo": "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None, compiled=True, "
            "chunk_size=1",
    "cpo": "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, "
           "compiled=True, average_log_prob=False, chunk_size=1",
    "simpo": "_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=False, "
             "compiled=True, gamma=0.5, chunk_size=1",
    "kto": "_input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None, kl=None, "
           "ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    """The order of `apply`'s arguments, which callers pass by position, and the functional names."""
    function = LOSSES[{"dpo": "dpo sigmoid"}.get(name, name)].function
    assert str(inspect.signature(function.forward)) == f"(ctx, {SIGNATURES[name]})"
    assert getattr(functional, f"liger_fused_linear_{name}") == function.apply
    assert f"liger_fused_linear_{name}" in dir(functional)


def test_importing_is_cheap():
    """trl imports the package with its trainers: no torch, no kernels, nothing on a device."""
    code = """
import sys, liger_kernel.chunked_loss as c, liger_kernel.chunked_loss.functional
assert "torch" not in sys.modules and "transformers" not in sys.modules
names = [f"LigerFusedLinear{n}Loss" for n in ("CPO", "DPO", "KTO", "ORPO", "SimPO")]
assert set(names) <= set(dir(c)) and set(names) <= set(c.__all__)
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
assert not __import__("torch").cuda.is_initialized() and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError):
        _ = chunked_loss.LigerFusedLinearNothingLoss
