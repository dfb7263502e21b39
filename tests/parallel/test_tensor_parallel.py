"""Tensor and sequence parallelism through DTensor: plans of torch and of transformers."""

import copy

import pytest
import torch
from ranks import DEVICE, WORLD
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from training import assert_same, full, inputs, model_of, patch, train

LENGTH = 8 * WORLD


def mesh():
    return torch.distributed.init_device_mesh(DEVICE, (WORLD,))


def same_inputs(step):
    """One batch for all ranks, which hold parts of the same model."""
    return inputs(step, length=LENGTH) | dict(position_ids=torch.arange(LENGTH, device=DEVICE)[None])


def plan(model, sequence, head):
    """torch's styles by hand: attention and MLP over heads and channels; between them, tokens are whole or spread."""
    tokens = Shard(1) if sequence else Replicate()
    layer = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
        "mlp.gate_proj": ColwiseParallel(use_local_output=not sequence),
        "mlp.up_proj": ColwiseParallel(use_local_output=not sequence),
        "mlp.down_proj": RowwiseParallel(output_layouts=tokens),
    }
    if sequence:
        layer |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": Replicate()}),
            "mlp": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate()),
        }
    whole = {f"model.layers.{i}.{name}": style for i in range(len(model.model.layers)) for name, style in layer.items()}
    whole["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
    if sequence:
        whole["model.norm"] = SequenceParallel(use_local_output=sequence == "local")
    if head:
        whole["lm_head"] = ColwiseParallel(
            input_layouts=tokens, output_layouts=Shard(-1) if head == "vocab" else Replicate(), use_local_output=head != "vocab")
    return whole


def work(kind, sequence, head):
    start, runs = model_of(kind), []
    for when in ("never", "before", "after"):
        model = copy.deepcopy(start).to(DEVICE)
        if when == "before":
            patch(model)
        parallelize_module(model, mesh(), plan(model, sequence, head))
        if when == "after":
            patch(model)
        # the unpatched model's logits stay spread over the vocabulary with loss_parallel alone
        with loss_parallel():
            runs.append(train(model, inputs=same_inputs))
    for ours in runs[1:]:
        assert_same(ours, runs[0], start=start)


@pytest.mark.parametrize("head", [None, "whole", "vocab"])
@pytest.mark.parametrize("sequence", [False, True, "local"])
def test_plan_of_torch(ranks, sequence, head):
    """C97: heads and channels spread, tokens too (norms get DTensors), the head's rows and the loss too."""
    if sequence and head is None:
        pytest.skip("nobody makes the tokens whole again before the head")
    ranks(work, "llama", sequence, head)


def of_transformers(kind, folder):
    """The plan that transformers' models bring, as from_pretrained applies it."""
    start = model_of(kind)
    if torch.distributed.get_rank() == 0:
        start.save_pretrained(folder)
    torch.distributed.barrier()
    runs = []
    for when in ("never", "after"):
        model = type(start).from_pretrained(folder, tp_plan="auto").to(DEVICE).train()
        if when == "after":
            patch(model)
        runs.append(train(model, inputs=same_inputs))
    # transformers hooks the head with a forward of its own, which the fused loss would go around
    assert_same(runs[1], runs[0], start=start, fused=False)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_plan_of_transformers(ranks, kind, tmp_path):
    ranks(of_transformers, kind, str(tmp_path))


def spread_ops():
    """C97: rows, channels or nothing spread over the ranks; results lie as the input does, gradients as their tensors do."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm, liger_layer_norm, liger_relu_squared, liger_rms_norm

    generator = torch.Generator().manual_seed(1)
    rows, columns = (2 * WORLD, 4 * WORLD, 16 * WORLD), (16 * WORLD,)
    x, residual, dy, weight, bias = (
        torch.randn(shape, generator=generator).to(DEVICE) for shape in (rows, rows, rows, columns, columns))
    ops = {
        "rms_norm": (lambda x, w: liger_rms_norm(x, w, 1e-6), (x, weight)),
        "layer_norm": (lambda x, w, b: liger_layer_norm(x, w, b, 1e-6), (x, weight, bias)),
        "fused_add_rms_norm": (lambda x, r, w: sum(liger_fused_add_rms_norm(x, r, w, 1e-6)), (x, residual, weight)),
        "relu_squared": (liger_relu_squared, (x,)),
    }
    group = mesh()
    for name, (function, operands) in ops.items():
        plain = [t.clone().requires_grad_() for t in operands]
        want = function(*plain)
        want.backward(dy)
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            for spread in (Replicate(), Shard(0), None):
                places = [placement if t.dim() > 1 else spread for t in operands]
                leaves = [t.clone() if at is None else distribute_tensor(t, group, [at]) for t, at in zip(operands, places, strict=True)]
                leaves = [t.requires_grad_() for t in leaves]
                got = function(*leaves)
                assert isinstance(got, DTensor) and got.shape == want.shape, (name, placement)
                assert got.placements in ((placement,), (Replicate(),)) and (placement == Shard(2) or got.placements == (placement,))
                torch.testing.assert_close(got.full_tensor(), want)
                got.backward(distribute_tensor(dy, group, [Replicate()]))
                for leaf, expected in zip(leaves, plain, strict=True):
                    assert isinstance(leaf.grad, DTensor) == isinstance(leaf, DTensor), (name, placement, spread)
                    if isinstance(leaf, DTensor):
                        leaf.grad = leaf.grad.redistribute(placements=[Replicate()])
                    where = f"{name} {placement} {spread}"
                    torch.testing.assert_close(full(leaf.grad), expected.grad.float(), msg=lambda m, where=where: f"{where}: {m}")


def test_spread_ops(ranks):
    ranks(spread_ops)


def pending_sum():
    """A Partial input is a sum still to be made, not an operand by itself."""
    from liger_kernel.transformers.functional import liger_rms_norm

    x, weight = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE), torch.ones(16, device=DEVICE)
    part = DTensor.from_local(x / WORLD, mesh(), [Partial()])
    torch.testing.assert_close(full(liger_rms_norm(part, weight, 1e-6)), liger_rms_norm(x, weight, 1e-6))


def test_pending_sum(ranks):
    ranks(pending_sum)
