"""LigerLayerNorm, the public forms of layer_norm, and both under torch.compile and autocast."""

import inspect

import pytest
import torch
import torch._dynamo.testing

import liger_kernel.ops
from liger_kernel.core.accuracy import UNIT_ROUNDOFF, devices
from liger_kernel.ops.layer_norm import (
    LigerLayerNorm,
    LigerLayerNormFunction,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    liger_layer_norm,
)


def gradients(function, *inputs):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype))
    return y, *(t.grad for t in leaves)


def test_construction():
    norm = LigerLayerNorm(16)
    assert torch.equal(norm.weight, torch.ones(16)) and torch.equal(norm.bias, torch.zeros(16))
    assert (norm.hidden_size, norm.eps, norm.variance_epsilon) == (16, 1e-6, 1e-6)
    assert isinstance(norm.bias, torch.nn.Parameter) and set(norm.state_dict()) == {"weight", "bias"}
    assert LigerLayerNorm(16, bias=True).bias.std() > 0.1
    assert torch.equal(LigerLayerNorm(16, init_fn="zeros").weight, torch.zeros(16))
    assert "16, eps=0.001" in repr(LigerLayerNorm(16, eps=1e-3)) and "LigerLayerNorm" in repr(norm)
    with pytest.raises(AssertionError, match="init_fn"):
        LigerLayerNorm(8, init_fn="random")
    with pytest.raises(ValueError, match="expected one number"):
        LigerLayerNorm((4, 8))
    names = list(inspect.signature(LigerLayerNorm).parameters)
    assert names[:7] == ["hidden_size", "eps", "bias", "init_fn", "impl", "mode", "backend"]
    norm = LigerLayerNorm(16, backend="cuda", mode="default")
    assert norm.impl == norm.backend == "cuda" and norm.mode == "default"
    norm.backend = None
    assert norm.impl is None


@pytest.mark.parametrize("device", devices())
def test_in_place_of_torch_layer_norm(device):
    """Built like nn.LayerNorm, and its forward bound to one: with a bias, without it, and without a weight."""
    x = torch.randn(3, 5, 48, device=device)
    ours, theirs = LigerLayerNorm((48,), eps=1e-5).to(device), torch.nn.LayerNorm((48,), eps=1e-5, device=device)
    torch.testing.assert_close(ours(x), theirs(x))
    plain = LigerLayerNorm(48, eps=1e-5, elementwise_affine=False)
    torch.testing.assert_close(plain(x), torch.nn.LayerNorm(48, elementwise_affine=False)(x))
    for options in ({}, {"bias": False}, {"elementwise_affine": False}):
        module = torch.nn.LayerNorm(48, device=device, **options)
        for p in module.parameters():
            torch.nn.init.normal_(p)
        expected = module(x)
        module.variance_epsilon, module.hidden_size, module.impl, module.mode = module.eps, module.normalized_shape, None, None
        module.forward = LigerLayerNorm.forward.__get__(module)
        module.extra_repr = LigerLayerNorm.extra_repr.__get__(module)
        torch.testing.assert_close(module(x), expected)
        assert "(48,), eps=1e-05" in repr(module)


@pytest.mark.parametrize("device", devices())
def test_public_forms_agree(device):
    x, w, b = torch.randn(2, 3, 16, device=device), torch.randn(16, device=device), torch.randn(16, device=device)
    y, dx, dw, db = gradients(lambda *t: layer_norm(*t, 1e-5), x, w, b)
    for form in (liger_layer_norm, LigerLayerNormFunction.apply, liger_kernel.ops.LigerLayerNormFunction.apply):
        for got, want in zip(gradients(lambda *t, form=form: form(*t, 1e-5), x, w, b), (y, dx, dw, db), strict=True):
            assert torch.equal(got, want)

    out, rows, mean, rstd, *_ = layer_norm_forward(x, w, b, 1e-5)
    assert torch.equal(out, y) and rows.shape == (6, 16) and mean.dtype == rstd.dtype == torch.float32
    dy = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape)
    for got, want in zip(layer_norm_backward(dy, rows, w, b, mean, rstd), (dx, dw, db), strict=True):
        assert torch.equal(got, want)
    assert [t is None for t in layer_norm_backward(dy, rows, w, b, mean, rstd, needs_dw=False, needs_db=True)] == [False, True, False]
    assert layer_norm_backward(dy, rows, w, None, mean, rstd)[2] is None


@pytest.mark.parametrize("device", devices())
def test_opcheck(device):
    for dtype, shape in ((torch.float32, (4, 32)), (torch.bfloat16, (2, 3, 32))):
        x, w, b = torch.randn(shape, device=device).to(dtype), torch.randn(32, device=device), torch.randn(32, device=device).to(dtype)
        y, mean, rstd = torch.ops.liger_kernel.layer_norm_forward(x, w, b, 1e-6, 0.0)
        checks = ("test_schema", "test_faketensor")
        for weight, bias in ((w, b), (w, None), (None, None)):
            torch.library.opcheck(torch.ops.liger_kernel.layer_norm_forward, (x, weight, bias, 1e-6, 0.0), test_utils=checks)
            for wants in ((True, True, True), (False, True, False), (True, False, True)):
                wants = wants[0], wants[1] and weight is not None, wants[2] and bias is not None
                torch.library.opcheck(
                    torch.ops.liger_kernel.layer_norm_backward, (y, x, weight, bias, mean, rstd, 0.0, *wants), test_utils=checks)


@pytest.mark.parametrize("device", devices())
def test_compile(device):
    """C63, C66: no graph break, one more compilation for other row counts, gradients as in eager mode."""
    norm = LigerLayerNorm(32, bias=True).to(device)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: norm(x) * 2, fullgraph=True, backend=counter)
    for rows in (3, 5, 6, 9, 17):
        x = torch.randn(rows, 32, device=device)
        for got, want in zip(gradients(compiled, x), gradients(lambda x: norm(x) * 2, x), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2

    for x, options in (
        (torch.randn(4, 128, 768, device=device).bfloat16(), {}),
        (torch.randn(8, 32, device=device), {"weight_offset": 1.0}),
        (torch.randn(32, 8, device=device).mT, {}),
    ):
        w, b = (torch.randn(x.shape[-1], device=device).to(x.dtype) for _ in range(2))
        function = lambda *t, options=options: layer_norm(*t, 1e-5, **options)
        results = gradients(torch.compile(function, fullgraph=True), x, w, b), gradients(function, x, w, b)
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=2 * UNIT_ROUNDOFF[x.dtype], atol=1e-6)


@pytest.mark.parametrize("device", devices())
def test_autocast(device):
    """The output keeps x's dtype, whatever the parameters' and autocast's."""
    norm = LigerLayerNorm(32, bias=True).to(device)
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            x = torch.randn(4, 32, device=device).to(dtype).requires_grad_()
            y = norm(x)
        y.float().square().sum().backward()
        assert y.dtype == dtype and x.grad.dtype == dtype
        assert norm.weight.grad.dtype == norm.bias.grad.dtype == torch.float32
        torch.testing.assert_close(y, layer_norm(x.detach(), norm.weight, norm.bias))
