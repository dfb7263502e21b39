"""LigerExperts and LigerExpertParallelFusedMoe: constructors, forward bound to other modules, errors."""

import types

import pytest
import torch

from liger_kernel.ops.fused_moe.cases import inputs
from liger_kernel.ops.fused_moe.modules import LigerExpertParallelFusedMoe, LigerExperts
from liger_kernel.ops.fused_moe.ref import eager


def config(**settings):
    return types.SimpleNamespace(**{"hidden_size": 16, "intermediate_size": 12, "hidden_act": "silu", "num_experts": 4, **settings})


@pytest.mark.parametrize("settings,experts,width", [
    (dict(num_local_experts=7), 4, 12),
    (dict(num_experts=None, num_local_experts=7, moe_intermediate_size=6), 7, 6),
    (dict(num_experts=None, n_routed_experts=3, hidden_act="swish"), 3, 12),
])
def test_constructor(settings, experts, width):
    module = LigerExperts(config(**settings))
    assert module.gate_up_proj.shape == (experts, 2 * width, 16) and module.down_proj.shape == (experts, 16, width)
    assert (module.num_experts, module.hidden_dim, module.intermediate_dim) == (experts, 16, width)
    assert list(module.state_dict()) == ["gate_up_proj", "down_proj"] and "num_experts" in repr(module)


def test_constructor_errors():
    with pytest.raises(ValueError, match="gelu"):
        LigerExperts(config(hidden_act="gelu"))
    with pytest.raises(AttributeError, match="num_experts, num_local_experts, n_routed_experts"):
        LigerExperts(config(num_experts=None))


@pytest.mark.parametrize("bound", [False, True], ids=["own", "bound"])
def test_forward(bound):
    """Any leading dimensions and any integer index; bound to a module that has nothing but the three attributes."""
    x, gate_up, down, index, weights = inputs(6, 16, 12, 4, 2)
    module = torch.nn.Module() if bound else LigerExperts(config())
    module.hidden_dim = 16
    module.gate_up_proj, module.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
    forward = LigerExperts.forward.__get__(module) if bound else module
    want = eager(x, gate_up, down, index, weights)
    torch.testing.assert_close(forward(x, index, weights), want)
    torch.testing.assert_close(forward(x.view(2, 3, 16), index.view(2, 3, 2).short(), weights.view(2, 3, 2)), want.view(2, 3, 16))
    forward(x, index.int(), weights).sum().backward()
    assert module.gate_up_proj.grad is not None and module.down_proj.grad is not None


def test_one_rank():
    x, gate_up, down, index, weights = inputs(6, 16, 12, 4, 2, torch.bfloat16)
    gate, up = gate_up.chunk(2, 1)
    for group in (None, types.SimpleNamespace(size=lambda: 1)):
        out = LigerExpertParallelFusedMoe(group)(x, index, weights, gate, up, down, 4)
        torch.testing.assert_close(out, eager(x, gate_up, down, index, weights), rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="num_experts is 8, all_B has 4"):
        LigerExpertParallelFusedMoe()(x, index, weights, gate, up, down, 8)
    with pytest.raises(NotImplementedError, match="2 ranks"):
        LigerExpertParallelFusedMoe(types.SimpleNamespace(size=lambda: 2))
