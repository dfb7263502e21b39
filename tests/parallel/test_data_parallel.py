"""DistributedDataParallel around a patched model."""

import contextlib

import pytest
import torch
from ranks import DEVICE
from torch.nn.parallel import DistributedDataParallel
from training import STEPS, compare_under, inputs, model_of, patch, rank_inputs, train


def wrap(model, **options):
    return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()] if DEVICE == "cuda" else None, **options)


def work(kind, options):
    ours, _ = compare_under(lambda model: wrap(model, **options), kind)
    losses = [torch.stack(ours.losses).to(DEVICE) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(losses, losses[torch.distributed.get_rank()].clone())
    assert (losses[0] != losses[1]).all(), "every rank has its own batch"


@pytest.mark.parametrize("kind, options", [
    ("llama", {}), ("qwen3", {"gradient_as_bucket_view": True}), ("gemma2", {"find_unused_parameters": True}),
    ("llama", {"static_graph": True, "bucket_cap_mb": 0.01}),
])
def test_ddp(ranks, kind, options):
    ranks(work, kind, options)


def one_process():
    """The mean over the ranks is what one process computes that sees all batches."""
    model = model_of().to(DEVICE)
    patch(model)
    ours = train(model, wrap(model))
    plain = model_of().to(DEVICE)
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [plain(**inputs(10 * step + other)).loss for other in range(world)]
        (sum(losses) / world).backward()
        optimizer.step()
        torch.testing.assert_close(ours.losses[step], losses[rank].detach(), rtol=1e-5, atol=0)
    for name, parameter in plain.named_parameters():
        for got, want in ((ours.gradients[name], parameter.grad), (ours.parameters[name], parameter.detach())):
            assert (got - want).abs().max() <= 1e-4 * want.abs().max(), name


def test_equals_one_process(ranks):
    ranks(one_process)


def accumulation():
    """no_sync, num_items_in_batch over both halves, checkpointed layers, bf16 autocast."""
    def run(model):
        wrapped = wrap(model)
        for half in range(2):
            with wrapped.no_sync() if half == 0 else contextlib.nullcontext():
                with torch.autocast(DEVICE, torch.bfloat16):
                    out = wrapped(**rank_inputs(half), num_items_in_batch=torch.tensor(36, device=DEVICE))
                out.loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    runs = []
    for patched in (False, True):
        model = model_of().to(DEVICE)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if patched:
            patch(model)
        runs.append(run(model))
    theirs, ours = runs
    for name, want in theirs.items():
        assert (ours[name] - want).norm() <= 2e-2 * want.norm(), name


def test_accumulation(ranks):
    ranks(accumulation)
