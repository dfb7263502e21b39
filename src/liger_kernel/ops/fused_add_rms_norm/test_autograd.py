"""Gradients of fused_add_rms_norm: sharing, wanted ones alone, backward twice; compiler, autocast, module, helpers."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import devices
from liger_kernel.ops import LigerFusedAddRMSNormFunction, fused_add_rms_norm_backward, fused_add_rms_norm_forward
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNorm, fused_add_rms_norm, liger_fused_add_rms_norm
from liger_kernel.ops.fused_add_rms_norm.ref import eager
from liger_kernel.ops.fused_add_rms_norm.test_fused_add_rms_norm import make, ours, run


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("compiled", [False, True])
def test_one_gradient_for_two_operands(compiled, device):
    """x and the residual get one tensor; nobody who accumulates into it may show in the other's gradient."""
    torch.manual_seed(0)
    x, r, w, dy, ds = make(6, 32, device=device)
    function = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    *_, want, _, _ = run(eager, x, r, w, dy, ds)

    # Two leaves: the .grad of one is not the other's.
    a, b, c = (t.clone().requires_grad_() for t in (x, r, w))
    for times in (1, 2):
        torch.autograd.backward(function(a, b, c), (dy, ds))
        torch.testing.assert_close((a.grad, b.grad), (times * want, times * want))
        assert a.grad.data_ptr() != b.grad.data_ptr()
    a.grad.zero_()
    torch.testing.assert_close(b.grad, 2 * want)

    # One operand has other uses, whose gradients are accumulated onto the shared one, before or after it.
    for extra_x, extra_r in ((1, 0), (0, 1), (1, 1)):
        a, b = x.clone().requires_grad_(), r.clone().requires_grad_()
        inner_a, inner_b = a * 1, b * 1
        y, s = function(inner_a, inner_b, w)
        loss = (y * dy).sum() + (s * ds).sum() + extra_x * (inner_a * 2).sum() + extra_r * (inner_b * 3).sum()
        loss.backward()
        torch.testing.assert_close((a.grad, b.grad), (want + 2 * extra_x, want + 3 * extra_r))

    # The same tensor twice (torch's compiler refuses that of any autograd.Function), and a chain as in a decoder.
    if not compiled:
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.autograd.backward(function(a, a, w), (dy, ds))
        torch.autograd.backward(eager(b, b, w), (dy, ds))
        torch.testing.assert_close(a.grad, b.grad)
    grads = []
    for f in (function, eager):
        a, b = x.clone().requires_grad_(), r.clone().requires_grad_()
        hidden, residual = a, b
        for _ in range(3):
            hidden, residual = f(hidden, residual, w)
            hidden = hidden.tanh()
        torch.autograd.backward((hidden, residual), (dy, ds))
        grads.append((a.grad, b.grad))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("device", devices())
def test_the_returned_object_is_one(device):
    """And a hook on one operand that returns another tensor leaves the other operand's gradient."""
    x, r, w, dy, ds = make(3, 16, device=device)
    a, b = x.requires_grad_(), r.requires_grad_()
    y, s = fused_add_rms_norm(a, b, w)
    with torch.no_grad():
        da, db, dw = y.grad_fn.apply(dy, ds)[:3]
    assert da is db and dw is None
    a.register_hook(lambda g: g * 0)
    torch.autograd.backward((y, s), (dy, ds))
    assert not a.grad.any() and torch.equal(b.grad, db)


@pytest.mark.parametrize("device", devices())
def test_gradients_only_where_wanted_and_twice(device):
    """C87: a second backward with another upstream; a frozen weight or input costs nothing and breaks nothing."""
    torch.manual_seed(1)
    x, r, w, dy, ds = make(5, 24, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, r, w)]
    out = fused_add_rms_norm(*leaves)
    torch.autograd.backward(out, (dy, ds), retain_graph=True)
    first = [t.grad.clone() for t in leaves]
    torch.autograd.backward(out, (3 * dy, 3 * ds))
    for leaf, g in zip(leaves, first, strict=True):
        torch.testing.assert_close(leaf.grad, 4 * g)
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        inputs = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, r, w))]
        torch.autograd.backward([t for t in fused_add_rms_norm(*inputs) if t.requires_grad], (dy, ds))
        for i, t in enumerate(inputs):
            if i in wanted:
                torch.testing.assert_close(t.grad, first[i])
            else:
                assert t.grad is None


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("compiled", [False, True])
def test_one_output_alone(compiled, device):
    """Only y, only s, and neither downstream."""
    torch.manual_seed(2)
    x, r, w, dy, _ = make(5, 24, device=device)
    function = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    for output in (0, 1):
        grads = []
        for f in (function, eager):
            leaves = [t.clone().requires_grad_() for t in (x, r, w)]
            f(*leaves)[output].backward(dy)
            grads.append([torch.zeros_like(t) if t.grad is None else t.grad for t in leaves])
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("device", devices())
def test_outputs_changed_in_place(device):
    """y may be overwritten; s is what backward reads, so overwriting it is an error as in eager code."""
    x, r, w, dy, _ = make(6, 24, device=device)
    x, r, dy = (t.view(2, 3, 24) for t in (x, r, dy))
    grads = []
    for f in (ours, eager):
        a = x.clone().requires_grad_()
        y, _ = f(a, r, w)
        y.mul_(2)
        y.backward(dy)
        grads.append(a.grad)
    torch.testing.assert_close(*grads)
    a = x.clone().requires_grad_()
    y, s = fused_add_rms_norm(a, r, w)
    s += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.parametrize("device", devices())
def test_opcheck_and_compile(device):
    """C63, C66: the ops are visible to the compiler; row counts do not recompile."""
    x, r, w, dy, ds = make(4, 32, device=device)
    op = torch.ops.liger_kernel
    _, s, rstd = op.fused_add_rms_norm_forward(x, r, w, 1e-6, 0.0, 0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.fused_add_rms_norm_forward, (x, r, w, 1e-6, 0.0, 0), test_utils=checks)
    for given, wants in ((ds, (True, True)), (None, (True, False)), (ds, (False, True))):
        torch.library.opcheck(op.fused_add_rms_norm_backward, (dy, given, s, w, rstd, 0.0, 0, *wants), test_utils=checks)

    def block(a, b, c):
        y, s = fused_add_rms_norm(a, b, c, 1e-6, 1.0, "gemma")
        return y * 2, s

    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        x, r, w, dy, ds = make(rows, 32, device=device)
        torch.testing.assert_close(run(compiled, x, r, w, dy, ds), run(block, x, r, w, dy, ds))
    assert counter.frame_count <= 2
    inductor = torch.compile(ours, fullgraph=True)
    for upstream in (ds, None):
        torch.testing.assert_close(run(inductor, x, r, w, dy, upstream), run(ours, x, r, w, dy, upstream))


@pytest.mark.parametrize("device", devices())
def test_autocast(device):
    """The op keeps its operands' dtypes, as the modules it stands for do; the backward runs under either state."""
    x, r, w, dy, ds = make(4, 32, torch.bfloat16, device, weight_dtype=torch.float32)
    want = run(ours, x, r, w, dy, ds)
    with torch.autocast(x.device.type, torch.bfloat16):
        got = run(ours, x, r, w, dy, ds)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("device", devices())
def test_public_forms(device):
    """The seven positions of apply, the functional, the module and its forward on a foreign object, and the helpers agree."""
    torch.manual_seed(3)
    x, r, w, dy, ds = make(6, 16, torch.bfloat16, device)
    want = run(ours, x, r, w, dy, ds)
    for form in (
        lambda a, b, c: LigerFusedAddRMSNormFunction.apply(a, b, c, 1e-6, 0.0, "llama", False),
        lambda a, b, c: LigerFusedAddRMSNormFunction.apply(a, b, c, 1e-6),
        lambda a, b, c: LigerFusedAddRMSNormFunction.apply(a, b, c, 1e-6, 0.0, 0, True),
        lambda X, R, W: liger_fused_add_rms_norm(X=X, R=R, W=W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=True),
    ):
        for a, b in zip(run(form, x, r, w, dy, ds), want, strict=True):
            assert torch.equal(a, b)

    Y, S, rstd, *opaque, mode = fused_add_rms_norm_forward(x.view(2, 3, 16), r.view(2, 3, 16), w, 1e-6, 0.0, "llama")
    assert mode == 0 and S.shape == (6, 16) and Y.shape == (2, 3, 16)
    dX, dR, dW = fused_add_rms_norm_backward(dy.view(2, 3, 16), ds.view(2, 3, 16), S, w, rstd, 0.0, mode, *opaque, False)
    assert dX is dR and torch.equal(dX.view(6, 16), want[2]) and torch.equal(dW, want[4])
    assert fused_add_rms_norm_backward(dy, None, S, w, rstd, 0.0, mode, needs_dw=False)[2] is None

    module = LigerFusedAddRMSNorm(16, init_fn="zeros", offset=1.0, casting_mode="gemma").to(device)
    assert "weight_shape=(16,), eps=1e-06, offset=1.0, in_place=False" in repr(module)
    torch.testing.assert_close(module(x, r), ours(x, r, torch.zeros_like(w), weight_offset=1.0, casting_mode="gemma"))

    class Foreign:
        weight, variance_epsilon, offset, casting_mode, in_place = w, 1e-6, 0.0, "llama", False

    assert torch.equal(LigerFusedAddRMSNorm.forward(Foreign(), x, r)[0], want[0])


def test_replicated_dtensors():
    """C97: plain activations with a replicated weight, and DTensors everywhere; results are DTensors where x is one, and the
    gradient of a DTensor is one."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

    x, r, w, dy, ds = make(4, 16)
    want = run(ours, x, r, w, dy, ds)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for spread in ((2,), (0, 1, 2)):
            leaves = [distribute_tensor(t, mesh, [Replicate()]) if i in spread else t.clone() for i, t in enumerate((x, r, w))]
            leaves = [t.requires_grad_() for t in leaves]
            y, s = fused_add_rms_norm(*leaves)
            assert isinstance(y, DTensor) == isinstance(s, DTensor) == (0 in spread)
            y, s = (t.full_tensor() if isinstance(t, DTensor) else t for t in (y, s))
            assert torch.equal(y, want[0]) and torch.equal(s, want[1])
            torch.autograd.backward((y, s), (dy, ds))
            for leaf, grad in zip(leaves, want[2:], strict=True):
                assert isinstance(leaf.grad, DTensor) == isinstance(leaf, DTensor)
                assert torch.equal(leaf.grad.full_tensor() if isinstance(leaf, DTensor) else leaf.grad, grad)
    finally:
        dist.destroy_process_group()
