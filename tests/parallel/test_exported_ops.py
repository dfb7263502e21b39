"""Each op through torch.export and AOTAutograd with fake tensors: shapes, dtypes and strides are known without a kernel."""

import pytest
import torch

from liger_kernel.transformers import functional as F

H, V = 32, 50


def _rope(q, k, cos):
    return F.liger_rope(q, k, cos, cos)


OPS = {
    "rms_norm": (lambda x, w: F.liger_rms_norm(x, w, 1e-6), [(4, 6, H), (H,)]),
    "layer_norm": (lambda x, w, b: F.liger_layer_norm(x, w, b, 1e-6), [(4, 6, H), (H,), (H,)]),
    "fused_add_rms_norm": (lambda x, r, w: F.liger_fused_add_rms_norm(x, r, w, 1e-6), [(4, 6, H), (4, 6, H), (H,)]),
    "group_norm": (lambda x, w, b: F.liger_group_norm(x, w, b, 8, 2, 1e-6), [(4, 8, 5), (8,), (8,)]),
    "poly_norm": (lambda x, w, b: F.liger_poly_norm(x, w, b, 1e-6), [(4, 6, H), (3,), (1,)]),
    "dyt": (F.liger_dyt, [(4, 6, H), (1,), (H,), (H,)]),
    "relu_squared": (F.liger_relu_squared, [(4, 6, H)]),
    "swiglu": (F.liger_swiglu, [(4, 6, H), (4, 6, H)]),
    "geglu": (F.liger_geglu, [(4, 6, H), (4, 6, H)]),
    "rope": (_rope, [(2, 4, 6, 16), (2, 2, 6, 16), (2, 6, 16)]),
    "cross_entropy": (lambda x: F.liger_cross_entropy(x, torch.arange(x.shape[0], device=x.device)), [(12, V)]),
    "fused_linear_cross_entropy": (
        lambda x, w: F.liger_fused_linear_cross_entropy(x, w, torch.arange(x.shape[0], device=x.device)), [(12, H), (V, H)]),
}


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def operands(name, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in OPS[name][1]]


def flat(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


@pytest.mark.parametrize("name", OPS)
def test_export(name):
    """Rows left open where there are rows: other numbers of rows, and the same result."""
    function, tensors = OPS[name][0], operands(name)
    rows = torch.export.Dim("rows", min=2, max=V)
    open_rows = [{0: rows} if t.dim() > 1 and t.shape[0] == tensors[0].shape[0] else {} for t in tensors]
    program = torch.export.export(Module(function), tuple(tensors), dynamic_shapes={"tensors": tuple(open_rows)})
    assert any(str(node.target).startswith("liger_kernel.") for node in program.graph.nodes)
    for count in (tensors[0].shape[0], 3):
        now = [t[:count] if entry else t for t, entry in zip(tensors, open_rows, strict=True)]
        for got, want in zip(flat(program.module()(*now)), flat(function(*now)), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPS)
def test_forward_and_backward(name, dtype):
    """The joint graph of AOTAutograd gives the gradients of the eager call, bit for bit."""
    from torch._functorch.aot_autograd import aot_export_joint_simple

    function, tensors = OPS[name][0], [t.requires_grad_() for t in operands(name, dtype)]
    out = flat(function(*tensors))
    upstream = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t.dtype) for t in out]
    differentiable = [t for t in out if t.requires_grad]
    wanted = torch.autograd.grad(differentiable, tensors, upstream[: len(differentiable)], allow_unused=True)

    graph = aot_export_joint_simple(lambda *t: tuple(flat(function(*t))), tuple(tensors), trace_joint=True)
    results = graph([*tensors], [*upstream])
    for got, want in zip(results[0], out, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(results[1], wanted, strict=True):
        assert (want is None or not want.abs().any()) if got is None else torch.equal(got, want)


@pytest.mark.parametrize("name", OPS)
def test_fake_tensors(name):
    """Shapes, dtypes and strides of a fake call, and of its gradients, are those of a real one."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    function = OPS[name][0]

    def layout(make):
        tensors = [make(t).requires_grad_() for t in operands(name, torch.bfloat16)]
        out = flat(function(*tensors))
        grads = torch.autograd.grad([t.float().sum() for t in out if t.requires_grad], tensors, allow_unused=True)
        return [None if t is None else (t.shape, t.dtype, t.stride(), t.device) for t in (*out, *grads)]

    with FakeTensorMode() as mode:
        fake = layout(mode.from_tensor)
    assert fake == layout(lambda t: t)
