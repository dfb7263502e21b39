"""The MLP modules of swiglu against Hugging Face's classes, their forwards bound to those, and DTensors."""

import os
import socket
import types

import pytest
import torch

from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, liger_swiglu, modules
from liger_kernel.ops.swiglu.ref import eager, packed

MODELS = [  # ours, Hugging Face's, configuration
    ("LigerSwiGLUMLP", "llama.modeling_llama.LlamaMLP", {"mlp_bias": False}),
    ("LigerSwiGLUMLP", "llama.modeling_llama.LlamaMLP", {"mlp_bias": True}),
    ("LigerSwiGLUMLP", "mistral.modeling_mistral.MistralMLP", {}),
    ("LigerSwiGLUMLP", "granite.modeling_granite.GraniteMLP", {"mlp_bias": True}),
    ("LigerSwiGLUMLP", "deepseek_v3.modeling_deepseek_v3.DeepseekV3MLP", {}),
    ("LigerPhi3SwiGLUMLP", "phi3.modeling_phi3.Phi3MLP", {}),
    ("LigerPhi3SwiGLUMLP", "glm4.modeling_glm4.Glm4MLP", {}),
    ("LigerQwen3MoeSwiGLUMLP", "qwen3_moe.modeling_qwen3_moe.Qwen3MoeMLP", {}),
    ("LigerHunyuanV1SwiGLUMLP", "hunyuan_v1_dense.modeling_hunyuan_v1_dense.HunYuanDenseV1MLP", {}),
    ("LigerFalconH1SwiGLUMLP", "falcon_h1.modeling_falcon_h1.FalconH1MLP", {"mlp_bias": False}),
    ("LigerFalconH1SwiGLUMLP", "falcon_h1.modeling_falcon_h1.FalconH1MLP", {"mlp_bias": True}),
    ("LigerSwiGLUMLPForMuseGlimmer", "muse_glimmer.modeling_muse_glimmer.MuseGlimmerTextMLP", {"hidden_activation": "silu"}),
]


def config(**changes):
    return types.SimpleNamespace(**(dict(hidden_size=24, intermediate_size=40, hidden_act="silu", mlp_multipliers=(0.5, 1.75)) | changes))


@pytest.mark.parametrize("ours, path, changes", MODELS, ids=str)
def test_against_hugging_face(ours, path, changes):
    """Departure 7: biases where the configuration asks for them; forwards bound to Hugging Face's modules."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    module, name = path.rsplit(".", 1)
    theirs = getattr(pytest.importorskip(f"transformers.models.{module}"), name)(config(**changes))
    cls = getattr(modules, ours)
    mine = cls(config(**changes))
    mine.load_state_dict(theirs.state_dict())
    for attribute in ("hidden_size", "intermediate_size", "config"):
        assert hasattr(mine, attribute)
    x = torch.randn(2, 5, 24)
    expected = theirs(x)
    gradient = torch.autograd.grad(expected.square().sum(), list(theirs.parameters()))
    theirs.forward = types.MethodType(cls.forward, theirs)
    for module in (mine, theirs):
        y = module(x)
        torch.testing.assert_close(y, expected)
        for got, want in zip(torch.autograd.grad(y.square().sum(), list(module.parameters())), gradient, strict=True):
            torch.testing.assert_close(got, want)


def test_constructors():
    assert modules.LigerSwiGLUMLP(config(), 56).gate_proj.weight.shape == (56, 24)
    assert modules.LigerQwen3MoeSwiGLUMLP(config(), intermediate_size=16).down_proj.weight.shape == (24, 16)
    assert modules.LigerHunyuanV1SwiGLUMLP(config(), 3, True).layer_idx == 3
    assert modules.LigerSwiGLUMLP(config(hidden_act="swish")).gate_proj.bias is None
    mixtral = modules.LigerBlockSparseTop2MLP(config())
    assert (mixtral.ffn_dim, mixtral.hidden_dim) == (40, 24)
    x = torch.randn(3, 24)
    torch.testing.assert_close(mixtral(x), mixtral.w2(eager(mixtral.w1(x), mixtral.w3(x))))
    for name in ("LigerSwiGLUMLP", "LigerBlockSparseTop2MLP", "LigerPhi3SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP", "LigerHunyuanV1SwiGLUMLP",
                 "LigerFalconH1SwiGLUMLP", "LigerSwiGLUMLPForMuseGlimmer"):
        with pytest.raises(ValueError, match="not supported"):
            getattr(modules, name)(config(hidden_act="gelu"))


def _worker(rank, port):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    a, b, dc = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 8)

    def expected(function, *tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        c = function(*leaves)
        c.backward(dc[..., : c.shape[-1]])
        return c.detach(), [t.grad for t in leaves]

    c, grads = expected(eager, a, b)
    for place_a, place_b in ((Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(1), None), (None, Shard(0))):
        leaves = [(t.clone() if place is None else distribute_tensor(t, mesh, [place])).requires_grad_()
                  for t, place in ((a, place_a), (b, place_b))]
        out = liger_swiglu(*leaves)
        assert out.placements == (place_a or place_b,) and out.shape == a.shape
        torch.testing.assert_close(out.full_tensor(), c)
        out.backward(distribute_tensor(dc, mesh, [Shard(0)]))
        for leaf, want in zip(leaves, grads, strict=True):
            assert isinstance(leaf.grad, DTensor) == isinstance(leaf, DTensor)
            torch.testing.assert_close(leaf.grad.full_tensor() if isinstance(leaf, DTensor) else leaf.grad, want)
    halves = DTensor.from_local(a / 2, mesh, [Partial()])  # a sum that is still to be made
    torch.testing.assert_close(liger_swiglu(halves, b).full_tensor(), c)

    c, (dy,) = expected(packed, a)
    for placement in (Shard(0), Shard(1), Replicate()):
        leaf = distribute_tensor(a, mesh, [placement]).requires_grad_()
        out = LigerFusedGateUpSiLUMulFunction.apply(leaf)
        torch.testing.assert_close(out.full_tensor(), c)
        out.backward(distribute_tensor(dc[:, :4].contiguous(), mesh, [Replicate()]))
        torch.testing.assert_close(leaf.grad.full_tensor(), dy)
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_dtensor_placements():
    """Two ranks: every combination of shards, also of rows that do not divide evenly, and of plain tensors."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_worker, args=(port,), nprocs=2)
