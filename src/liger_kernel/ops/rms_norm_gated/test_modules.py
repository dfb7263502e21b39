"""LigerRMSNormGated against the gated norms of the installed transformers: attributes, forward and gradients."""

import importlib
import inspect

import pytest
import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF, devices
from liger_kernel.ops.rms_norm_gated import LigerRMSNormGated

pytest.importorskip("transformers")

# modelling module and class -> (what its constructor takes besides the width, what ours does)
GATE_LAST, GATE_FIRST = dict(), dict(norm_before_gate=False)
GROUPS = ({"group_size": 64}, dict(GATE_FIRST, group_size=64))
CLASSES = {
    "qwen3_next.Qwen3NextRMSNormGated": ({}, GATE_LAST),
    "qwen3_5.Qwen3_5RMSNormGated": ({}, GATE_LAST),
    "qwen3_5_moe.Qwen3_5MoeRMSNormGated": ({}, GATE_LAST),
    "olmo_hybrid.OlmoHybridRMSNormGated": ({}, GATE_LAST),
    "qwen4_exp.Qwen4ExpTextRMSNormGated": ({"activation": "sigmoid"}, dict(activation="sigmoid")),
    "kimi_linear.KimiLinearRMSNormGated": ({}, dict(activation="sigmoid", casting_mode="gemma")),
    "glm5_next.Glm5NextTextRMSNormGated": ({}, dict(activation="sigmoid", casting_mode="gemma")),
    "bailing_hybrid.BailingHybridRMSNormGated": ({}, dict(activation="sigmoid", casting_mode="gemma")),
    "lara_mini.LaraMiniRMSNormGated": ({}, dict(casting_mode="gemma")),
    "mamba2.MambaRMSNormGated": GROUPS,
    "nemotron_h.NemotronHRMSNormGated": GROUPS,
    "bamba.BambaRMSNormGated": GROUPS,
    "granitemoehybrid.GraniteMoeHybridRMSNormGated": GROUPS,
    "zamba2.Zamba2RMSNormGated": GROUPS,
    "falcon_h1.FalconH1RMSNormGated": ({"n_groups": 4}, dict(group_size=64, casting_mode="gemma")),
    "falcon_h1.FalconH1RMSNormGated:first": (
        {"n_groups": 4, "norm_before_gate": False}, dict(GATE_FIRST, group_size=64, casting_mode="gemma")),
}
WIDTH = 256


def modules_of(name, dtype, device):
    """Transformers' module and ours, with the same weight. Up to 5.17 some classes have no groups."""
    where, _, cls = name.partition(":")[0].partition(".")
    try:
        cls = getattr(importlib.import_module(f"transformers.models.{where}.modeling_{where}"), cls)
    except (ImportError, AttributeError):
        pytest.skip(f"the installed transformers has no {cls}")
    theirs, ours = map(dict, CLASSES[name])
    if "group_size" not in inspect.signature(cls).parameters and theirs.pop("group_size", None):
        del ours["group_size"]
    theirs, ours = cls(WIDTH, eps=1e-5, **theirs), LigerRMSNormGated(WIDTH, eps=1e-5, **ours)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(device, dtype), ours.to(device, dtype)


def run(module, x, gate, dy):
    module.zero_grad()
    x, gate = (None if t is None else t.detach().clone().requires_grad_() for t in (x, gate))
    y = module(x, gate)
    y.backward(dy.to(y.dtype))
    return [y, x.grad, module.weight.grad.clone()] + ([] if gate is None else [gate.grad])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", CLASSES)
def test_as_transformers(name, device):
    """fp32: the same numbers. bf16 and fp16: the largest error against fp64 is at most twice theirs; the same forward but for ties."""
    torch.manual_seed(0)
    x, gate, dy = (torch.randn(8, 12, WIDTH, device=device) for _ in range(3))
    theirs, ours = modules_of(name, torch.float32, device)
    assert set(theirs.state_dict()) == set(ours.state_dict()) and theirs.variance_epsilon == ours.variance_epsilon
    for got, want in zip(run(ours, x, gate, dy), run(theirs, x, gate, dy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for dtype in (torch.bfloat16, torch.float16):
        tensors = [t.to(dtype) for t in (x, gate, dy)]
        half = [module.to(dtype) for module in modules_of(name, torch.float32, device)]
        mine, plain = run(half[1], *tensors), run(half[0], *tensors)
        truth = run(half[1].float(), *(t.float() for t in tensors))
        for a, b, t in zip(mine, plain, truth, strict=True):
            assert a.dtype == b.dtype == dtype
            limit = 2 * (b.float() - t).abs().max() + UNIT_ROUNDOFF[dtype] * t.abs().max()
            assert (a.float() - t).abs().max() <= limit
        assert (mine[0] != plain[0]).double().mean() < 0.01


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", [name for name in CLASSES if CLASSES[name][1].get("group_size")])
def test_without_gate(name, device):
    torch.manual_seed(1)
    x, dy = (torch.randn(2, 3, WIDTH, device=device) for _ in range(2))
    theirs, ours = modules_of(name, torch.float32, device)
    for got, want in zip(run(ours, x, None, dy), run(theirs, x, None, dy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_module():
    module = LigerRMSNormGated(12, group_size=4, norm_before_gate=False)
    assert "group_size=4" in repr(module) and list(module.state_dict()) == ["weight"]
    with pytest.raises(ValueError, match="group_size is 5"):
        LigerRMSNormGated(12, group_size=5)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        LigerRMSNormGated(12, activation="relu")
    with pytest.raises(ValueError, match="group_size is True"):
        LigerRMSNormGated(12, group_size=True)
    assert LigerRMSNormGated(12, device="meta", dtype=torch.bfloat16).weight.is_meta
