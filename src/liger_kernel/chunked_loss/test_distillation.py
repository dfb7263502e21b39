"""The distillation losses against their fp64 definition: the built-in ones in the kernels, and subclasses through the Python path."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from liger_kernel import chunked_loss
from liger_kernel.chunked_loss.cosine_similarity_loss import LigerFusedLinearCosineSimilarityFunction, LigerFusedLinearCosineSimilarityLoss
from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction, LigerFusedLinearJSDLoss
from liger_kernel.chunked_loss.ref_distillation import eager, reference
from liger_kernel.core.accuracy import UNIT_ROUNDOFF, assert_accurate, devices
from liger_kernel.ops.fused_linear_jsd.cases import DTYPES, Bounds

on_devices = pytest.mark.parametrize("device", devices())
MODULES = {"jsd": LigerFusedLinearJSDLoss, "cosine": LigerFusedLinearCosineSimilarityLoss}
FUNCTIONS = {"jsd": LigerFusedLinearJSDFunction, "cosine": LigerFusedLinearCosineSimilarityFunction}
both = pytest.mark.parametrize("divergence", MODULES)


def make(rows, hidden, teacher_hidden, vocab, dtype, device="cpu", teacher_vocab=0, bias=False):
    """The seven tensors of forward."""
    x, t = (torch.randn(rows, h, device=device).to(dtype) for h in (hidden, teacher_hidden))
    weight, other = ((torch.randn(v, h, device=device) * 2 / h**0.5).to(dtype)
                     for v, h in ((vocab, hidden), (vocab + teacher_vocab, teacher_hidden)))
    target = torch.randint(vocab, (rows,), device=device)
    target[1::3] = -100
    biases = (torch.randn(v, device=device).to(dtype) if bias else None for v in (vocab, vocab + teacher_vocab))
    return x, weight, t, other, target, *biases


def gradients(function, tensors, upstream=1.0, **options):
    """([loss, soft, hard], dx, dw, db)"""
    leaves = [t if i not in (0, 1, 5) or t is None else t.detach().clone().requires_grad_() for i, t in enumerate(tensors)]
    results = function(*leaves, **options)
    results = results if isinstance(results, tuple) else (results,)
    results[0].backward(torch.full_like(results[0], upstream))
    return [r.detach() for r in results], *(None if leaves[i] is None else leaves[i].grad for i in (0, 1, 5))


def check(function, tensors, upstream=-3.0, tolerance=1, **options):
    """`options` as of the reference; `function` takes none."""
    x, weight, t, other, target, bias, teacher_bias = tensors
    ours = gradients(function, tensors, upstream)
    truth = gradients(reference, [None if a is None else a.double() if a.is_floating_point() else a for a in tensors], upstream, **options)
    names = {"weight_hard_loss": "hard_weight", "weight_soft_loss": "soft_weight"}
    known = {"weight_hard_loss": 0.5, "weight_soft_loss": 0.5, **options}
    bounds = Bounds(x, weight, t, other, target, bias, teacher_bias, **{names.get(k, k): v for k, v in known.items()})
    size = abs(upstream) * tolerance
    for what, got, want, bound in zip(("loss", "dx", "dw", "db"), (ours[0][0], *ours[1:]), (truth[0][0], *truth[1:]),
                                      (tolerance * bounds.loss, size * bounds.dx(), size * bounds.dw(), size * bounds.db()), strict=True):
        if got is not None:
            assert_accurate(got, want, bound, None, what)
    return ours, truth


OPTIONS = [
    {},
    {"beta": 0.0, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0},
    {"beta": 0.1, "temperature": 2.0},
    {"beta": 1.0, "temperature": 0.8, "ignore_index": 3},
    {"weight_hard_loss": 1.0, "weight_soft_loss": 0.0},
]


@on_devices
@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("teacher_vocab", [0, 7])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_built_in(options, teacher_vocab, bias, dtype, divergence, device):
    torch.manual_seed(0)
    tensors = list(make(60, 24, 40, 83, dtype, device, teacher_vocab, bias))
    tensors[4][tensors[4] == -100] = options.get("ignore_index", -100)
    module = MODULES[divergence](**options, return_soft_hard_loss=True)
    ours, truth = check(module, tensors, divergence=divergence, **options)
    for got, want in zip(ours[0][1:], truth[0][1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=16 * UNIT_ROUNDOFF[dtype], atol=4 * UNIT_ROUNDOFF[dtype])


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_less_accurate_than_eager(dtype, device):
    torch.manual_seed(1)
    tensors = make(300, 32, 48, 515, dtype, device)
    options = {"beta": 0.3, "temperature": 2.0}
    ours, truth = check(LigerFusedLinearJSDLoss(**options), tensors, upstream=1.0, **options)
    theirs = gradients(lambda *a: eager(*a[:5], **options), tensors)
    for what, got, want, other in zip(("dx", "dw"), ours[1:3], truth[1:3], theirs[1:3], strict=True):
        assert_accurate(got, want, float("inf"), other, what)


class ReverseKL(LigerFusedLinearDistillationBase):
    """A user's own loss, with its own forward and the inherited backward."""

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None):
        log_q, log_p = torch.log_softmax(student_logits, -1), torch.log_softmax(teacher_logits, -1)
        return torch.where(target == ignore_index, 0, (log_q.exp() * (log_q - log_p)).sum(-1)).sum()

    @classmethod
    def forward(cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
                weight_hard_loss=0.5, weight_soft_loss=0.5, ignore_index=-100, temperature=1.0, chunk_size=16, return_soft_hard_loss=False):
        return super().forward(
            cls=cls, ctx=ctx, student_input=student_input, student_weight=student_weight, teacher_input=teacher_input,
            teacher_weight=teacher_weight, target=true_labels, student_bias=student_bias, teacher_bias=teacher_bias, chunk_size=chunk_size,
            ignore_index=ignore_index, weight_hard_loss=weight_hard_loss, weight_soft_loss=weight_soft_loss, temperature=temperature,
            return_soft_hard_loss=return_soft_hard_loss)


class PythonJSD(LigerFusedLinearJSDFunction):
    """The built-in loss through the base class's path."""

    @staticmethod
    def distillation_loss_fn(*args, **kwargs):
        return LigerFusedLinearJSDFunction.distillation_loss_fn(*args, **kwargs)


class PythonCosine(LigerFusedLinearCosineSimilarityFunction):
    @staticmethod
    def distillation_loss_fn(*args, **kwargs):
        return LigerFusedLinearCosineSimilarityFunction.distillation_loss_fn(*args, **kwargs)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 16, 1024])
@pytest.mark.parametrize("name", ["user", "jsd", "cosine"])
def test_subclasses(name, chunk_size, dtype, device):
    """A distillation_loss_fn of one's own, in chunks of every size; a larger teacher; each gradient only where required."""
    torch.manual_seed(2)
    tensors = make(40, 24, 16, 50, dtype, device, teacher_vocab=3, bias=True)
    if name == "user":
        options = {"divergence": "jsd", "beta": 1.0, "temperature": 2.0}
        call = lambda *a: ReverseKL.apply(*a, 0.5, 0.5, -100, 2.0, chunk_size, True)
    else:
        options = {"divergence": name, "beta": 0.3, "temperature": 2.0}
        cls = PythonJSD if name == "jsd" else PythonCosine
        assert not cls.in_kernels and FUNCTIONS[name].in_kernels
        call = lambda *a: cls.apply(*a, 0.5, 0.5, 0.3, -100, 2.0, True, chunk_size, True)
    ours, truth = check(call, tensors, tolerance=4, **options)
    for got, want in zip(ours[0][1:], truth[0][1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=16 * UNIT_ROUNDOFF[dtype], atol=4 * UNIT_ROUNDOFF[dtype])
    for i in (0, 1, 5):
        leaves = [t if t is None else t.clone() for t in tensors]
        leaves[i].requires_grad_()
        loss, soft, hard = call(*leaves)
        loss.backward(torch.tensor(-3.0, device=device))
        assert not soft.requires_grad and not hard.requires_grad
        torch.testing.assert_close(leaves[i].grad, dict(zip((0, 1, 5), ours[1:], strict=True))[i])
    with torch.no_grad():
        results = call(*tensors)
        assert not any(r.requires_grad for r in results)
        torch.testing.assert_close(results[0], ours[0][0])


def test_base_needs_a_loss():
    class Nothing(ReverseKL):
        distillation_loss_fn = LigerFusedLinearDistillationBase.distillation_loss_fn

    with pytest.raises(NotImplementedError, match="distillation_loss_fn"):
        Nothing.apply(*make(4, 8, 8, 10, torch.float32))


@on_devices
def test_extra_loss_arguments_and_chunk_forward(device):
    """loss_kwargs reach the loss; chunk_forward may be replaced, and its parts have the documented shapes."""
    class Scaled(ReverseKL):
        @staticmethod
        def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=0.5, power=1):
            assert beta == 0.25
            return power * ReverseKL.distillation_loss_fn(student_logits, teacher_logits, target, ignore_index)

        @classmethod
        def forward(cls, ctx, *arguments):
            return LigerFusedLinearDistillationBase.forward(cls, ctx, *arguments, beta=0.25, power=3, weight_hard_loss=0.0)

    tensors = make(9, 8, 8, 10, torch.float32, device)
    torch.testing.assert_close(Scaled.apply(*tensors), 3 * ReverseKL.apply(*tensors, 0.0))
    student, teacher, hard = LigerFusedLinearDistillationBase.chunk_forward(*tensors)
    assert student.shape == teacher.shape == (9, 10)
    torch.testing.assert_close(hard, F.cross_entropy(student, tensors[4], reduction="sum"))
    assert float(LigerFusedLinearDistillationBase.chunk_forward(*tensors, compute_ce_loss=False)[2]) == 0


@on_devices
@both
def test_as_trainers_call_it(divergence, device):
    """3-D non-contiguous slices and 2-D labels, keywords, `compiled`, no hard loss."""
    torch.manual_seed(3)
    hidden, teacher = torch.randn(3, 9, 16, device=device, requires_grad=True), torch.randn(3, 9, 24, device=device)
    weight, other = torch.randn(40, 16, device=device, requires_grad=True), torch.randn(40, 24, device=device)
    target = torch.randint(40, (3, 9), device=device)
    target[:, :4] = -100
    loss = MODULES[divergence](weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, ignore_index=-100, temperature=0.9, compiled=False)
    got = loss(student_input=hidden[:, :-1], student_weight=weight, teacher_input=teacher[:, :-1], teacher_weight=other,
               true_labels=target[:, 1:], student_bias=None, teacher_bias=None)
    got.backward()
    mine = [hidden.grad.clone(), weight.grad.clone()]
    hidden.grad = weight.grad = None
    want = reference(hidden[:, :-1], weight, teacher[:, :-1], other, target[:, 1:], weight_hard_loss=0.0, weight_soft_loss=1.0,
                     temperature=0.9, divergence=divergence)[0]
    want.backward()
    torch.testing.assert_close(got, want)
    for a, b in zip(mine, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@on_devices
@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_label_ignored(dtype, divergence, device):
    tensors = make(8, 16, 16, 30, dtype, device, bias=True)
    tensors[4].fill_(-100)
    results, *grads = gradients(MODULES[divergence](return_soft_hard_loss=True), tensors)
    for t in (*results, *grads):
        assert torch.equal(t, torch.zeros_like(t))


@on_devices
@both
def test_chunk_size_does_not_change_the_result(divergence, device):
    torch.manual_seed(4)
    tensors = make(500, 16, 16, 60, torch.float32, device)
    results = [gradients(MODULES[divergence](chunk_size=size), tensors) for size in (1, 100, 1024, 5000)]
    for other in results[1:]:
        for a, b in zip((results[0][0][0], *results[0][1:3]), (other[0][0], *other[1:3]), strict=True):
            torch.testing.assert_close(a, b)


@on_devices
@both
def test_second_backward(divergence, device):
    tensors = make(20, 16, 16, 30, torch.float32, device)
    x = tensors[0].requires_grad_()
    loss = MODULES[divergence]()(*tensors)
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward(torch.tensor(3.0, device=device))
    torch.testing.assert_close(x.grad, 4 * first)
    with pytest.raises(RuntimeError, match="second time|modified by an inplace"):
        loss.backward()


@on_devices
@both
def test_function_is_the_module(divergence, device):
    """`apply`, whose biases have no default, gives what the module gives."""
    tensors = make(20, 16, 12, 40, torch.float32, device, bias=True)
    got, want = gradients(FUNCTIONS[divergence].apply, tensors), gradients(MODULES[divergence](), tensors)
    for a, b in zip((got[0][0], *got[1:]), (want[0][0], *want[1:]), strict=True):
        assert torch.equal(a, b)
    frozen = [t if i != 0 else t.clone().requires_grad_() for i, t in enumerate(tensors)]
    FUNCTIONS[divergence].apply(*frozen).backward()
    torch.testing.assert_close(frozen[0].grad, want[1])
    with torch.no_grad():
        assert not FUNCTIONS[divergence].apply(*frozen).requires_grad


@on_devices
@both
def test_compile(divergence, device):
    tensors = make(20, 16, 12, 40, torch.float32, device, bias=True)
    module = MODULES[divergence](temperature=2.0, return_soft_hard_loss=True)
    compiled = torch.compile(module, fullgraph=True)
    got, want = gradients(compiled, tensors), gradients(module, tensors)
    for a, b in zip((*got[0], *got[1:]), (*want[0], *want[1:]), strict=True):
        torch.testing.assert_close(a, b)


@on_devices
def test_errors(device):
    tensors = make(8, 16, 12, 30, torch.float32, device)
    for module in MODULES.values():
        with pytest.raises(AssertionError, match="temperature"):
            module(temperature=0)
    for call in (LigerFusedLinearJSDLoss(), ReverseKL.apply):
        with pytest.raises(ValueError, match="29 entries"):
            call(*tensors[:3], tensors[3][:29], *tensors[4:])
        with pytest.raises(ValueError, match="equal"):
            call(*tensors[:4], tensors[4][:5], None, None)
    with pytest.raises(ValueError, match="beta is 2"):
        LigerFusedLinearJSDLoss(beta=2)(*tensors)
    tensors[4][0] = 30
    with pytest.raises(AssertionError, match="out of bounds"):
        LigerFusedLinearJSDLoss()(*tensors)
    assert LigerFusedLinearJSDLoss(weight_hard_loss=0.0)(*tensors).isfinite()


def test_names_and_signatures():
    names = ["weight_hard_loss", "weight_soft_loss", "beta", "ignore_index", "temperature", "compiled", "chunk_size",
             "return_soft_hard_loss"]
    tensors = ["student_input", "student_weight", "teacher_input", "teacher_weight", "true_labels", "student_bias", "teacher_bias"]
    for divergence, module in MODULES.items():
        assert list(inspect.signature(module).parameters) == names
        assert list(inspect.signature(module.forward).parameters) == ["self", *tensors]
        assert list(inspect.signature(FUNCTIONS[divergence].forward).parameters) == ["ctx", *tensors, *names]
        assert issubclass(FUNCTIONS[divergence], LigerFusedLinearDistillationBase)
    assert inspect.signature(LigerFusedLinearCosineSimilarityFunction.distillation_loss_fn).parameters["beta"].default == 1.0
    assert chunked_loss.LigerFusedLinearJSDLoss is LigerFusedLinearJSDLoss
    assert chunked_loss.LigerFusedLinearCosineSimilarityLoss is LigerFusedLinearCosineSimilarityLoss
    assert "beta=0.25" in repr(LigerFusedLinearJSDLoss(beta=0.25))
