"""What every op promises to autograd and its neighbours in torch, whatever it computes: second derivatives are refused, DTensors keep
their kind, shapes alone are enough (meta, FakeTensor), a call is one kernel, and a machine without a GPU needs nothing else."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_kernel.chunked_loss import (
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
)
from liger_kernel.core.accuracy import devices
from liger_kernel.ops.cross_entropy import liger_cross_entropy
from liger_kernel.ops.dyt import liger_dyt
from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm
from liger_kernel.ops.fused_linear_cross_entropy import liger_fused_linear_cross_entropy
from liger_kernel.ops.fused_linear_jsd import liger_fused_linear_jsd
from liger_kernel.ops.fused_linear_kl_div import liger_fused_linear_kl_div
from liger_kernel.ops.fused_moe import liger_fused_moe
from liger_kernel.ops.geglu import liger_geglu
from liger_kernel.ops.group_norm import liger_group_norm
from liger_kernel.ops.grpo_loss import triton_grpo_loss
from liger_kernel.ops.jsd import liger_jsd
from liger_kernel.ops.kl_div import liger_kl_div
from liger_kernel.ops.layer_norm import layer_norm
from liger_kernel.ops.poly_norm import liger_poly_norm
from liger_kernel.ops.relu_squared import liger_relu_squared
from liger_kernel.ops.rms_norm import LigerRMSNorm, LigerRMSNormFunction, rms_norm
from liger_kernel.ops.rms_norm_gated import liger_rms_norm_gated
from liger_kernel.ops.rope import rope
from liger_kernel.ops.selective_log_softmax import selective_log_softmax
from liger_kernel.ops.softmax import liger_softmax
from liger_kernel.ops.sparsemax import liger_sparsemax
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, liger_swiglu
from liger_kernel.ops.tvd import liger_tvd

ROWS, HIDDEN, VOCAB = 6, 16, 24


def target(like):
    return torch.arange(ROWS, device=like.device)


def table(like):
    return torch.linspace(-1, 1, ROWS * HIDDEN, device=like.device).view(ROWS, HIDDEN)


def distribution(like):
    return torch.softmax(torch.linspace(-2, 2, ROWS * VOCAB, device=like.device).view(ROWS, VOCAB), -1)


def experts(x, gate_up, down, weights):
    return liger_fused_moe(x, gate_up, down, torch.arange(2 * ROWS, device=x.device).view(ROWS, 2) % 3, weights)


def ones(like, *shape):
    return torch.ones(shape, device=like.device)


def preference(loss):
    """A chunked preference loss of hidden states [ROWS, HIDDEN] taken as two sequences, head weight and bias."""
    return lambda x, w, b: loss(w, x.view(2, 3, HIDDEN), target(x).view(2, 3), b)[0]


# op -> (function of tensors that train, their shapes); the name in errors is the part before the colon
OPS = {
    "rms_norm": (rms_norm, [(ROWS, HIDDEN), (HIDDEN,)]),
    "fused_add_rms_norm": (lambda x, r, w: torch.stack(fused_add_rms_norm(x, r, w)), [(ROWS, HIDDEN), (ROWS, HIDDEN), (HIDDEN,)]),
    "rms_norm_gated": (liger_rms_norm_gated, [(ROWS, HIDDEN), (ROWS, HIDDEN), (HIDDEN,)]),
    "rms_norm_gated:gate first": (
        lambda x, gate, w: liger_rms_norm_gated(x, gate, w, norm_before_gate=False, group_size=4), [(ROWS, HIDDEN)] * 2 + [(HIDDEN,)]),
    "layer_norm": (layer_norm, [(ROWS, HIDDEN), (HIDDEN,), (HIDDEN,)]),
    "poly_norm": (liger_poly_norm, [(ROWS, HIDDEN), (3,), (1,)]),
    "relu_squared": (liger_relu_squared, [(ROWS, HIDDEN)]),
    "dyt": (liger_dyt, [(ROWS, HIDDEN), (1,), (HIDDEN,), (HIDDEN,)]),
    "group_norm": (lambda x, w, b: liger_group_norm(x, w, b, 4, 2, 1e-6), [(2, 4, HIDDEN), (4,), (4,)]),
    "swiglu": (liger_swiglu, [(ROWS, HIDDEN)] * 2),
    "swiglu:packed": (LigerFusedGateUpSiLUMulFunction.apply, [(ROWS, HIDDEN)]),
    "geglu": (liger_geglu, [(ROWS, HIDDEN)] * 2),
    "rope": (lambda q, k: torch.cat(rope(q, k, table(q), table(q) / 2), 1), [(2, 3, ROWS, HIDDEN), (2, 1, ROWS, HIDDEN)]),
    "cross_entropy": (lambda x: liger_cross_entropy(x, target(x)), [(ROWS, VOCAB)]),
    "cross_entropy:none": (lambda x: liger_cross_entropy(x, target(x), reduction="none"), [(ROWS, VOCAB)]),
    "fused_linear_cross_entropy": (
        lambda x, w, b: liger_fused_linear_cross_entropy(x, w, target(x), b), [(ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)]),
    "fused_linear_cross_entropy:none": (
        lambda x, w: liger_fused_linear_cross_entropy(x, w, target(x), reduction="none"), [(ROWS, HIDDEN), (VOCAB, HIDDEN)]),
    "softmax": (liger_softmax, [(ROWS, VOCAB)]),
    "sparsemax": (liger_sparsemax, [(ROWS, VOCAB)]),
    "sparsemax:columns": (lambda x: liger_sparsemax(x, 0), [(ROWS, VOCAB)]),
    "kl_div": (lambda x: liger_kl_div(x, distribution(x)), [(ROWS, VOCAB)]),
    "kl_div:none": (lambda x: liger_kl_div(x, distribution(x), reduction="none"), [(ROWS, VOCAB)]),
    "tvd": (lambda x: liger_tvd(x, distribution(x)), [(ROWS, VOCAB)]),
    "tvd:none": (lambda x: liger_tvd(x, distribution(x), reduction="none"), [(ROWS, VOCAB)]),
    "jsd": (lambda x: liger_jsd(x, table(x)[:, :1].expand(-1, VOCAB) - 3, target(x)), [(ROWS, VOCAB)]),
    "fused_linear_jsd": (
        lambda x, w: liger_fused_linear_jsd(x, w, table(x), table(x).repeat(4, 1), target(x)), [(ROWS, HIDDEN), (VOCAB, HIDDEN)]),
    "fused_linear_kl_div": (
        lambda x, w: liger_fused_linear_kl_div(x, w, table(x)[:, :1].expand(-1, VOCAB).abs(), target(x)),
        [(ROWS, HIDDEN), (VOCAB, HIDDEN)]),
    "chunked_loss:dpo": (preference(LigerFusedLinearDPOLoss(use_ref_model=False)), [(ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)]),
    "chunked_loss:orpo": (preference(LigerFusedLinearORPOLoss()), [(ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)]),
    "fused_moe": (experts, [(ROWS, HIDDEN), (3, 10, HIDDEN), (3, HIDDEN, 5), (ROWS, 2)]),
    "selective_log_softmax": (lambda x: selective_log_softmax(x, target(x)), [(ROWS, VOCAB)]),
    "grpo_loss": (
        lambda x: triton_grpo_loss(x.contiguous(), None, None, target(x)[None, :-1], ones(x, 1), beta=0.0, inplace=False, reduce=True)[0],
        [(1, ROWS, VOCAB)]),
    "chunked_loss:grpo": (
        lambda x, w: LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)(x, w, target(x)[None], ones(x, 1, ROWS), ones(x, 1))[0],
        [(1, ROWS, HIDDEN), (VOCAB, HIDDEN)]),
    "chunked_loss:kto": (
        lambda x, w, b: LigerFusedLinearKTOLoss()(x.view(2, 3, HIDDEN), w, target(x).view(2, 3), b, target(x)[:2] == 0)[0],
        [(ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)]),
}
every_op = pytest.mark.parametrize("name", OPS)


def leaves(name, device="cpu", transposed=False):
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=device) for shape in OPS[name][1]]
    if transposed:
        tensors = [t.mT.contiguous().mT if t.dim() > 1 else t for t in tensors]
    return [t.requires_grad_() for t in tensors]


@every_op
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("device", devices())
def test_second_derivative_is_refused(name, transposed, power, device):
    """Never a silent zero: not by backward(), not by grad() for leaves, nor for the op's own inputs; whether the upstream gradient
    depends on them (power 2) or not."""
    if name == "rope" and power == 1:
        pytest.skip("linear: under a constant upstream gradient the second derivative is zero indeed")
    function, op = OPS[name][0], name.partition(":")[0]

    def run():
        tensors = leaves(name, device, transposed)
        inputs = [t * 1 for t in tensors]
        loss = function(*inputs).pow(power).sum()
        plain = torch.autograd.grad(loss, inputs, retain_graph=True)
        graphed = torch.autograd.grad(loss, inputs, create_graph=True)
        for a, b in zip(plain, graphed, strict=True):
            assert torch.equal(a, b)
        return tensors, inputs, loss, loss + sum(g.pow(2).sum() for g in graphed)

    tensors, inputs, loss, total = run()
    for asked in (tensors, inputs, inputs[:1]):
        with pytest.raises(RuntimeError, match=f"{op}: its gradient has no derivative"):
            torch.autograd.grad(total, asked, retain_graph=True)
    loss.backward()  # the graph of the gradients is there, and nobody asks for their derivative
    assert all(t.grad is not None for t in tensors)
    with pytest.raises(RuntimeError, match=f"{op}: its gradient has no derivative"):
        run()[3].backward()


@every_op
@pytest.mark.parametrize("frozen", [0, 1])
def test_second_derivative_with_frozen_inputs(name, frozen):
    function, tensors = OPS[name][0], leaves(name)
    if len(tensors) == 1:
        pytest.skip("one input")
    tensors[frozen].requires_grad_(False)
    loss = function(*tensors).pow(2).sum()
    asked = [t for t in tensors if t.requires_grad]
    graphed = torch.autograd.grad(loss, asked, create_graph=True)
    with pytest.raises(RuntimeError, match="its gradient has no derivative"):
        torch.autograd.grad(sum(g.pow(2).sum() for g in graphed), asked)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("device", devices())
def test_create_graph_where_backward_overwrites(retain, device):
    """The in-place forms under create_graph: their gradients are there, and refuse a derivative like any other."""
    for name, function in (("swiglu", lambda x: LigerFusedGateUpSiLUMulFunction.apply(x, True).sum()),
                           ("cross_entropy", lambda x: liger_cross_entropy(x, target(x), in_place=True))):
        (x,) = leaves({"swiglu": "swiglu:packed"}.get(name, name), device)
        want = torch.autograd.grad(function(x * 1), x)[0]
        (got,) = torch.autograd.grad(function(x * 1), x, create_graph=True, retain_graph=retain)
        assert torch.equal(got, want)
        with pytest.raises(RuntimeError, match=f"{name}: its gradient has no derivative"):
            got.sum().backward()


@every_op
def test_shapes_alone(name):
    """Tensors without values: on the meta device and under FakeTensorMode, forward and backward, no compiler around."""
    from torch._subclasses import FakeTensorMode

    function, tensors = OPS[name][0], leaves(name)
    want = function(*tensors)
    gradients = torch.autograd.grad(want.sum(), tensors)
    values = [t.detach() for t in tensors]

    def check(make):
        inputs = [make(t).requires_grad_() for t in values]
        got = function(*inputs)
        for a, b in zip((got, *torch.autograd.grad(got.sum(), inputs)), (want, *gradients), strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)

    check(lambda t: t.to("meta"))
    with FakeTensorMode() as mode:
        check(mode.from_tensor)


class Launches(TorchDispatchMode):
    """Names of the ops that a block dispatches, views left out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if not (function.is_view or function in (torch.ops.aten.detach.default, torch.ops.aten._unsafe_view.default)):
            self.names.append(function.name())
        return result


@every_op
@pytest.mark.parametrize("device", devices())
def test_one_meta_tensor(name, device):
    """A weight that was never loaded among tensors with values is an error, never memory that nobody wrote."""
    for i in range(len(OPS[name][1])):
        tensors = leaves(name, device)
        if len(tensors) == 1:
            pytest.skip("one input")
        tensors[i] = tensors[i].detach().to("meta").requires_grad_()
        with pytest.raises(RuntimeError):
            OPS[name][0](*tensors)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "swiglu:packed", "geglu", "rope"])
def test_a_call_is_one_launch(name, device):
    """C116: what a small batch costs is calls, so there is one each way; the first call compiles nothing and does nothing else."""
    function, tensors = {"rope": lambda q, k: rope(q, k, cos, sin)}.get(name, OPS[name][0]), leaves(name, device)
    cos = sin = table(tensors[0])
    with Launches() as forward:
        out = function(*tensors)
    out = out if isinstance(out, tuple) else (out,)
    upstream = [torch.ones_like(t) for t in out]
    with Launches() as backward:
        torch.autograd.grad(out, tensors, upstream)
    for launched in (forward, backward):
        assert len(launched.names) == 1 and launched.names[0].startswith("liger_kernel::"), launched.names


def test_cpu_alone():
    """C114: without a GPU in sight every op runs, on its plainest variant too, imports no other kernel library and warns of nothing."""
    code = """
import sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, sys.argv[1])
import test_ops_in_autograd as t, torch
warnings.simplefilter("error")
assert not torch.cuda.is_available()
for name, (function, _) in t.OPS.items():
    tensors = t.leaves(name)
    function(*tensors).sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in tensors), name
assert "triton" not in sys.modules
"""
    names = {name.partition(":")[0] for name in OPS}
    for variant in (None, "cpu"):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        if variant:
            environment |= {f"LIGER_{name.upper()}": variant for name in names}
        command = [sys.executable, "-c", code, os.path.dirname(__file__)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def mesh(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs gloo")
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@every_op
@pytest.mark.parametrize("place", ["replicated", "sharded"])
def test_dtensors(name, place, mesh):
    """C97: each input a DTensor beside plain ones, and all of them; the gradient of a DTensor is a DTensor, and an optimizer takes it."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    function, plain = OPS[name][0], leaves(name)
    if name in ("rope", "fused_add_rms_norm"):  # torch.cat and torch.stack of plain tensors and DTensors are refused by torch
        function = {"rope": lambda q, k: rope(q, k, table(plain[0]), table(plain[0]) / 2), "fused_add_rms_norm": fused_add_rms_norm}[name]

    def run(tensors):
        out = function(*tensors)
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in (out if isinstance(out, tuple) else (out,))]
        sum(t.pow(2).sum() for t in whole).backward()
        return whole

    want = run(plain)
    for spread in [{i} for i in range(len(plain))] + [set(range(len(plain)))]:
        placement = [Replicate() if place == "replicated" else Shard(0)]
        tensors = [t.detach().clone() for t in plain]
        tensors = [distribute_tensor(t, mesh, placement) if i in spread else t for i, t in enumerate(tensors)]
        tensors = [torch.nn.Parameter(t) for t in tensors]
        for a, b in zip(run(tensors), want, strict=True):
            torch.testing.assert_close(a, b)
        for t, expected in zip(tensors, plain, strict=True):
            assert isinstance(t.grad, DTensor) == isinstance(t, DTensor)
            torch.testing.assert_close(t.grad.full_tensor() if isinstance(t, DTensor) else t.grad, expected.grad)
        torch.optim.AdamW([t for i, t in enumerate(tensors) if i in spread]).step()


def test_norm_module_with_dtensor_weight(mesh):
    """C97: the module as a sharding wrapper leaves it, and the positional form that other packages call."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    x = torch.randn(3, HIDDEN)
    norm = LigerRMSNorm(HIDDEN)
    norm.weight = torch.nn.Parameter(distribute_tensor(torch.ones(HIDDEN), mesh, [Replicate()]))
    for call in (norm, lambda x: LigerRMSNormFunction.apply(x, norm.weight, 1e-6, 0.0, "llama", False, None)):
        norm.weight.grad = None
        call(x).sum().backward()
        assert isinstance(norm.weight.grad, DTensor)
    optimizer = torch.optim.AdamW(norm.parameters())
    optimizer.step()


def test_dtensor_targets_and_class_weights(mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    x, w = torch.randn(ROWS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    labels, classes = target(x), torch.rand(VOCAB)

    def spread(t):
        return distribute_tensor(t, mesh, [Replicate()])

    for call in (lambda t, c: liger_cross_entropy(x @ w.T, t, c), lambda t, c: liger_fused_linear_cross_entropy(x, w, t, None, c)):
        torch.testing.assert_close(call(spread(labels), spread(classes)), call(labels, classes))
