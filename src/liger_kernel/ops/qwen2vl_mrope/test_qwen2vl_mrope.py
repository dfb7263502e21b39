"""qwen2vl_mrope against its fp64 definition, eager PyTorch, and the merging of transformers' rotary embedding."""

import pytest
import torch

from liger_kernel.core.accuracy import devices
from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction, liger_multimodal_rotary_pos_emb, liger_qwen2vl_mrope
from liger_kernel.ops.qwen2vl_mrope.cases import DTYPES, SHAPES, check, inputs, run, tables

pytestmark = pytest.mark.parametrize("device", devices())
SHAPE = (2, 4, 2, 7, (4, 6, 6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    for table_dtype in {torch.float32, dtype}:
        check(*inputs(shape, device, dtype), *tables(shape[0], shape[3], sum(shape[4]), device, table_dtype), shape[4])


def test_halves_that_differ(device):
    """Each column counts for its own channel, as in transformers' formula."""
    torch.manual_seed(3)
    cos, sin = (torch.randn(3, 2, 7, 32, device=device) for _ in range(2))
    check(*inputs(SHAPE, device), cos, sin, SHAPE[4])


def test_axis_orders_and_names(device):
    """unsqueeze_dim 2, lists and tuples, and every public name."""
    tensors = inputs(SHAPE, device)
    cos, sin = tables(2, 7, 16, device)
    want = run(liger_multimodal_rotary_pos_emb, *tensors, cos, sin, SHAPE[4])
    for function in (LigerQwen2VLMRopeFunction.apply, liger_qwen2vl_mrope):
        for a, b in zip(run(function, *tensors, cos, sin, list(SHAPE[4])), want, strict=True):
            assert torch.equal(a, b)
    swapped = run(liger_qwen2vl_mrope, *(t.transpose(1, 2) for t in tensors), cos, sin, SHAPE[4], unsqueeze_dim=2)
    for a, b in zip(swapped, want, strict=True):
        assert torch.equal(a.transpose(1, 2), b)


def test_against_transformers(device):
    """Newer versions merge the sections inside the rotary embedding: the result with its tables is the same."""
    modeling = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    q, k, dq, dk = inputs((2, 4, 2, 7, (16, 24, 24)), device)
    torch.manual_seed(4)
    positions = torch.randint(0, 300, (3, 2, 7, 1), device=device)
    angles = positions * 10000.0 ** (-torch.arange(64, device=device) / 64)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    merged = [torch.cat([m[i % 3] for i, m in enumerate(t.split([16, 24, 24] * 2, dim=-1))], -1) for t in (cos, sin)]
    ours = run(liger_qwen2vl_mrope, q, k, dq, dk, cos, sin, [16, 24, 24])
    for got, want in zip(ours, run(modeling.apply_rotary_pos_emb, q, k, dq, dk, *merged), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-6)


def test_frozen_inputs_second_backward_and_values(device):
    q, k, dq, dk = inputs(SHAPE, device)
    cos, sin = tables(2, 7, 16, device)
    before = [t.clone() for t in (q, k, cos, sin)]
    want = run(liger_qwen2vl_mrope, q, k, dq, dk, cos, sin, SHAPE[4])
    x = k.detach().requires_grad_()
    out = liger_qwen2vl_mrope(q, x, cos, sin, SHAPE[4])[1]
    out.backward(dk, retain_graph=True)
    assert torch.equal(x.grad, want[3])
    out.backward(3 * dk)
    torch.testing.assert_close(x.grad, 4 * want[3])
    assert all(torch.equal(a, b) for a, b in zip((q, k, cos, sin), before, strict=True)) and q.grad is None


def test_empty(device):
    tensors = inputs((2, 4, 2, 0, (4, 6, 6)), device)
    out = run(liger_qwen2vl_mrope, *tensors, *tables(2, 0, 16, device), (4, 6, 6))
    assert [t.shape for t in out] == [t.shape for t in tensors]


def test_errors(device):
    q, k, _, _ = inputs(SHAPE, device)
    cos, sin = tables(2, 7, 16, device)
    for c, sections in ((cos[:2], (4, 6, 6)), (cos, (4, 6)), (cos, (4, 6, 7)), (cos[0], (4, 6, 6))):
        with pytest.raises(ValueError, match="cos has the shape .* and mrope_section is"):
            liger_qwen2vl_mrope(q, k, c, sin, sections)
    with pytest.raises(ValueError, match="rope: cos has the shape"):
        liger_qwen2vl_mrope(q, k, cos[:, :, :6], sin[:, :, :6], (4, 6, 6))


def test_compile(device):
    tensors = inputs(SHAPE, device)
    cos, sin = tables(2, 7, 16, device)

    def model(q, k, cos, sin):
        a, b = liger_qwen2vl_mrope(q, k, cos, sin, [4, 6, 6])
        return a * 2 + q, b - k

    for got, want in zip(run(torch.compile(model, fullgraph=True), *tensors, cos, sin), run(model, *tensors, cos, sin), strict=True):
        torch.testing.assert_close(got, want)
