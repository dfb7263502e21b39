"""LigerFusedLinearScaledCrossEntropyFunction: positions, results, gradients, errors."""

import pytest
import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF, devices
from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction
from liger_kernel.ops.fused_linear_log_probs.ref import reference
from liger_kernel.ops.fused_linear_log_probs.test_fused_linear_log_probs import make

apply = LigerFusedLinearScaledCrossEntropyFunction.apply


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)], ids=["both", "nll", "entropy"])
def test_results_and_gradients(used, dtype, device):
    """As verl calls it; either upstream gradient may be absent."""
    torch.manual_seed(0)
    x, weight, target = make(60, 32, 301, dtype, device)
    x.requires_grad_(), weight.requires_grad_()
    nll, entropy = apply(x, weight, target, 0.7, -100, 1, True)
    assert nll.dtype == torch.float32 and entropy.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    logp, true_entropy, _ = reference(*wide, target, temperature=0.7)
    u = UNIT_ROUNDOFF[dtype]
    assert (nll.double() + logp).norm() <= 8 * u * logp.norm()
    assert (entropy.double() - true_entropy).norm() <= 8 * u * true_entropy.norm()
    upstream = torch.randn(60, device=device).to(dtype)
    pairs = [(a, b) for a, b, wanted in zip((nll, entropy), (-logp, true_entropy), used, strict=True) if wanted]
    torch.autograd.backward([a for a, _ in pairs], [upstream.to(a.dtype) for a, _ in pairs])
    torch.autograd.backward([b for _, b in pairs], [upstream.double() for _ in pairs])
    for got, want in zip((x.grad, weight.grad), (t.grad for t in wide), strict=True):
        # A probability carries its logit's absolute error, a few units of |z| (about 10 here).
        assert got.dtype == dtype and (got.double() - want).norm() <= 32 * u * want.norm()
    alone = apply(x, weight, target, 0.7)
    assert torch.equal(alone, nll) and not bool(alone[target == -100].any())


def test_errors():
    x, weight, target = make(8, 16, 30, torch.float32, ignored=0.0)
    for position, values in ((5, (True, 1.0, "1")), (6, (1, None)), (3, (True, "1", None))):
        for value in values:
            arguments = [x, weight, target, 1.0, -100, 1, False]
            arguments[position] = value
            with pytest.raises(TypeError, match="fused_linear_scaled_cross_entropy"):
                apply(*arguments)
    for bad in ((x.bfloat16(), weight, target), (x.int(), weight.int(), target), (x, weight, target.int())):
        with pytest.raises(TypeError, match="dtype|float|int64"):
            apply(*bad)
    for position, values in ((5, (0, -3)), (3, (0, -1.0, float("nan"), float("inf")))):
        for value in values:
            arguments = [x, weight, target, 1.0, -100, 1, False]
            arguments[position] = value
            with pytest.raises(ValueError, match="m_tiles_per_cluster|temperature"):
                apply(*arguments)
    for bad in ((x[None], weight, target), (x, weight[0], target), (x, weight, target[:, None]), (x, weight[:, :8], target),
                (x, weight, target[:5]), (x[:0], weight, target[:0]), (x, weight[:0], target)):
        with pytest.raises(ValueError, match="expected"):
            apply(*bad)
    for bad in (30, -1):
        target[2] = bad
        with pytest.raises(ValueError, match="out of bounds"):
            apply(x, weight, target)
    with pytest.raises(ValueError, match="one device"):
        apply(x, weight.to("meta"), target)
