"""torch.compile of whole patched models, and export: one graph, no recompilation as lengths vary, autocast, checkpoints, DDP, FSDP 2.

Loss and gradients of one step at two lengths are compared in tests/test_patch_compile.py."""

import copy

import pytest
import torch
from ranks import DEVICE
from training import assert_same, inputs, model_of, patch, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def step(run, model, batch, **context):
    model.zero_grad(set_to_none=True)
    with torch.autocast(**context) if context else torch.enable_grad():
        loss = run(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(ours, theirs, tolerance):
    torch.testing.assert_close(ours[0], theirs[0], rtol=tolerance, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    for name, want in theirs[1].items():
        assert (ours[1][name] - want).norm() <= tolerance * want.norm(), name


class Counted:
    """A backend that counts the graphs it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        return lookup_backend("aot_eager")(graph, example_inputs)


def moved(batch, device):
    return {name: t.to(device) for name, t in batch.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind, dynamic", [("llama", None), ("gemma2", True)])
def test_lengths(kind, dynamic, device):
    """C66, C75, C119: many lengths and batch sizes in two whole graphs: the first shape's, or with dynamic=True the first cache's (the
    unpatched model has two as well), and one for all others."""
    model = model_of(kind, num_hidden_layers=1).to(device)
    plain = copy.deepcopy(model)
    patch(model)
    backend = Counted()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    for length in (12, 17, 33, 5, 64, 23):
        batch = moved(inputs(length, 2, length), device)
        got = step(compiled, model, batch)
        if length in (33, 23):
            assert_near(got, step(plain, plain, batch), 1e-4)
    assert backend.graphs == 2
    for size in (3, 5):
        step(compiled, model, moved(inputs(size, size, 21), device))
    assert backend.graphs <= (2 if dynamic else 3)


@pytest.mark.parametrize("device", DEVICES)
def test_static(device):
    """dynamic=False: every length is a graph of its own, and a length that comes again is not."""
    model = model_of(num_hidden_layers=1).to(device)
    plain = copy.deepcopy(model)
    patch(model)
    backend = Counted()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    for length in (12, 17, 12):
        batch = moved(inputs(length, 2, length), device)
        assert_near(step(compiled, model, batch), step(plain, plain, batch), 1e-4)
    assert backend.graphs == 2


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    """Autocast around a compiled step: no further from fp32 than twice what the unpatched eager model is."""
    model = model_of("qwen3", num_hidden_layers=1).to(device)
    plain = copy.deepcopy(model)
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (12, 17):
        batch = moved(inputs(length, 2, length), device)
        exact = step(plain, plain, batch)
        theirs = step(plain, plain, batch, device_type=device, dtype=torch.bfloat16)
        ours = step(compiled, model, batch, device_type=device, dtype=torch.bfloat16)
        for name, want in exact[1].items():
            bound = 2 * (theirs[1][name] - want).norm() + 2**-8 * want.norm()
            assert (ours[1][name] - want).norm() <= bound, name


def test_recomputed_layers():
    """Checkpointed layers inside the graph."""
    model = model_of()
    model.config.use_cache = False
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = moved(inputs(1), "cpu")
    assert_near(step(compiled, model, batch), step(plain, plain, batch), 1e-4)


def test_layer_by_layer():
    """Each layer compiled alone, as one does to shorten compilation: one graph serves all layers that have no cache."""
    model = model_of(num_hidden_layers=3)
    model.config.use_cache = False
    plain = copy.deepcopy(model)
    patch(model)
    backend = Counted()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    batch = moved(inputs(1), "cpu")
    assert_near(step(model, model, batch), step(plain, plain, batch), 1e-4)
    assert backend.graphs == 1


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """torch.export of a patched model with a length that is left open: logits of other lengths."""
    model = model_of(num_hidden_layers=1).eval()
    plain = copy.deepcopy(model)
    patch(model)

    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(input_ids=ids, use_cache=False).logits

    def export(model):
        length = torch.export.Dim("length", min=2, max=128)
        ids = inputs(0, 2, 16)["input_ids"].cpu()
        return torch.export.export(Logits(model), (ids,), dynamic_shapes={"ids": {1: length}}, strict=strict)

    with torch.no_grad():
        try:
            export(plain)
        except torch._dynamo.exc.UserError:
            pytest.skip(f"torch {torch.__version__} cannot export the unpatched model")
        program = export(model)
        names = {str(node.target) for node in program.graph.nodes}
        assert any(name.startswith("liger_kernel.") for name in names), "the patched layers are not in the graph"
        for n in (16, 7, 40):
            ids = inputs(n, 2, n)["input_ids"].cpu()
            torch.testing.assert_close(program.module()(ids), plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def compiled_wrapper(kind):
    """A compiled patched model under a wrapper, and an eager unpatched one under the same wrapper."""
    import test_data_parallel
    import test_fsdp2

    start, runs = model_of(num_hidden_layers=1), []
    for patched in (False, True):
        model = copy.deepcopy(start).to(DEVICE)
        if patched:
            patch(model)
        if patched and kind == "fsdp2 layers":
            for layer in model.model.layers:
                layer.compile(backend="aot_eager")
        wrapped = test_data_parallel.wrap(model) if kind == "ddp" else test_fsdp2.wrap(model, "head")
        compiled = torch.compile(wrapped, backend="aot_eager") if patched and kind != "fsdp2 layers" else wrapped
        runs.append(train(model, compiled))
    assert_same(runs[1], runs[0], start=start)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2 layers"])
def test_sharded(ranks, kind):
    ranks(compiled_wrapper, kind)
