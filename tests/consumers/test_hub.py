"""transformers' `use_kernels` with the layers of liger_kernel.hub, through the `kernels` package: runs in the hub environments."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

if os.environ.get("LIGER_TEST_LIFT_KERNELS"):  # the newest transformers asks for a newer `kernels` than PyPI has
    _version = importlib.metadata.version
    importlib.metadata.version = lambda name: os.environ["LIGER_TEST_LIFT_KERNELS"] if name == "kernels" else _version(name)

if importlib.util.find_spec("kernels") is None:
    pytest.skip("needs the kernels package: see test_environments.py", allow_module_level=True)

import kernels
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import is_kernels_available

from liger_kernel import hub
from liger_kernel.hub import layers
from liger_kernel.patch import compare, tiny

assert is_kernels_available(), f"transformers {transformers.__version__} does not take kernels {kernels.__version__}"
TYPES = ["llama", "qwen3", "olmo2"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "liger-kernels"
    hub.write_repository(folder)
    return folder


def kernelized(model_type, config, training=True):
    model = tiny.causal_lm(model_type).train(training)
    model.set_use_kernels(True, config)
    return model


def replaced(model):
    """{class name of the module: name of the class whose forward it runs} where that is another."""
    return {type(module).__name__: forward.__qualname__.split(".")[0] for module in model.modules()
            if (forward := module.__dict__.get("forward")) is not None and forward.__func__ is not type(module).forward}


def rotation(model):
    return getattr(sys.modules[type(model).__module__].apply_rotary_pos_emb, "forward", None)


def restore_rotation(model):
    vars(sys.modules[type(model).__module__].apply_rotary_pos_emb).pop("forward", None)


@pytest.fixture(params=TYPES)
def plain(request):
    """(model type, model and its run without kernels)"""
    model = tiny.causal_lm(request.param)
    restore_rotation(model)
    run = compare.run(model, **compare.inputs())
    yield request.param, model, run
    restore_rotation(model)


def sources(repository):
    variant = next(p for p in (repository / "build").iterdir() if "-cpu-" in p.name)
    return {"installed": None, "universal variant": repository, "bundled variant": variant}


@pytest.mark.parametrize("source", ["installed", "universal variant", "bundled variant"])
def test_training_is_that_of_the_unpatched_model(source, plain, repository):
    model_type, _, expected = plain
    model = kernelized(model_type, hub.kernel_config(sources(repository)[source], mlp=True))
    prefix = {"llama": "Llama", "qwen3": "Qwen3", "olmo2": "Olmo2"}[model_type]
    assert replaced(model) == {f"{prefix}RMSNorm": "LigerRMSNorm", f"{prefix}MLP": "LigerSwiGLUMLP"}
    assert rotation(model).__qualname__ == "LigerRotaryPosEmb.forward"
    distance = compare.distance(compare.run(model, **compare.inputs()), expected)
    assert max(distance.logits, distance.loss, distance.gradients) < 5e-6, distance


def test_bf16_rounds_where_the_class_does(plain):
    """Logits and gradients are no further from the fp32 model than those of the model as it is."""
    model_type, model, truth = plain
    theirs = compare.distance(compare.run(model.bfloat16(), **compare.inputs()), truth)
    ours = tiny.causal_lm(model_type).bfloat16().train()
    ours.set_use_kernels(True, hub.kernel_config(mlp=True))
    distance = compare.distance(compare.run(ours, **compare.inputs()), truth)
    assert distance.logits < 1.5 * theirs.logits and distance.gradients < 1.5 * theirs.gradients


def test_compiles_without_a_break(plain):
    model_type, _, _ = plain
    given = compare.inputs()
    del given["attention_mask"]
    results = []
    for compiled in (False, True):
        model = kernelized(model_type, hub.kernel_config(mlp=True))
        run = torch.compile(model, fullgraph=True) if compiled else model
        out = run(**given, use_cache=False)
        out.loss.backward()
        results.append((out.loss.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)


def test_generation_and_change_of_mode(plain):
    """transformers replaces layers again at each change between train() and eval()."""
    model_type, model, _ = plain
    ids = compare.inputs()["input_ids"][:1, :7]
    expected = model.eval().generate(ids, max_new_tokens=6, do_sample=False)
    ours = kernelized(model_type, hub.kernel_config(mlp=True))
    assert torch.equal(ours.eval().generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert replaced(ours) and replaced(ours.train())


def test_from_pretrained(tmp_path, plain):
    model_type, model, _ = plain
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True, kernel_config=hub.kernel_config())
    assert "LigerRMSNorm" in replaced(loaded).values()
    with torch.no_grad():
        ids = compare.inputs()["input_ids"]
        logits = loaded(ids).logits
        restore_rotation(model)
        torch.testing.assert_close(logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def test_local_kernels_stands_in_for_hub_repositories(repository, tmp_path):
    """LOCAL_KERNELS=repository=folder, and the layer names that transformers' default mapping asks for; nothing is downloaded."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from kernels import LayerRepository, get_kernel\n"
        "from liger_kernel import hub\n"
        "for name in sys.argv[1:]:\n"
        "    layer = LayerRepository('kernels-community/liger-kernels', layer_name=name, revision='main').load()\n"
        "    assert layer.__module__ == 'liger_kernel.hub.layers', layer\n"
        "mapping = hub.kernel_mapping('someone/liger-kernels')\n"
        "print(*sorted(repo['cpu'].load().__name__ for repo in mapping.values()))\n")
    names = ["LigerRMSNorm", "LigerSwiGLUMLP", "LigerTiledSwiGLUMLP", "LigerGEGLUMLP", "LigerTiledGEGLUMLP", "LigerForCausalLMLossLayer"]
    local = f"kernels-community/liger-kernels={repository}:someone/liger-kernels={repository}"
    done = subprocess.run([sys.executable, script, *names], env={**os.environ, "LOCAL_KERNELS": local, "HF_HUB_OFFLINE": "1"},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == sorted(hub.LAYERS.values())


def test_bundled_variant_needs_no_installed_package(repository, tmp_path):
    """The variant's own copy serves where no liger_kernel is installed, and refuses where another project's is."""
    variant = sources(repository)["bundled variant"]
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        "sys.path[:] = [p for p in sys.path if not (pathlib.Path(p) / 'liger_kernel').is_dir()] + sys.argv[2:]\n"
        "import kernels, torch\n"
        "kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))\n"
        "import liger_kernel, liger_kernel._native as native\n"
        "assert sys.argv[1] in liger_kernel.__file__ and sys.argv[1] in native.PATH, (liger_kernel.__file__, native.PATH)\n"
        "norm = torch.nn.RMSNorm(64, eps=1e-6)\n"
        "x = torch.randn(3, 64, requires_grad=True)\n"
        "y = kernel.layers.LigerRMSNormRoundThenScale.forward(norm, x)\n"
        "torch.testing.assert_close(y, norm(x)); y.sum().backward(); print('served')\n")
    # torch and kernels without the folder that also holds this package's library
    clean = tmp_path / "site"
    clean.mkdir()
    for path in map(pathlib.Path, sys.path):
        if (path / "liger_kernel").is_dir():
            for entry in path.iterdir():
                if not entry.name.startswith(("liger_kernel", "_editable")) and not (clean / entry.name).exists():
                    (clean / entry.name).symlink_to(entry)
    environment = {k: v for k, v in os.environ.items() if k not in ("LIGER_KERNEL_LIBRARY", "PYTHONPATH")}
    command = [sys.executable, script, str(variant), str(clean)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "served" in done.stdout, done.stderr[-3000:]
    (clean / "liger_kernel").mkdir()
    (clean / "liger_kernel" / "__init__.py").write_text("")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode and "another project's" in done.stderr, done.stderr[-3000:]


def test_what_is_written(repository):
    names = {p.name for p in (repository / "build").iterdir()}
    assert "torch-universal" in names and any(n.startswith("torch-stable-abi210-cpu-") for n in names)
    identifiers = [json.loads((repository / "build" / n / "metadata.json").read_text())["id"] for n in names]
    assert len(set(identifiers)) == len(names)
    assert len(hub.write_repository(repository, bundle=False)) == 1  # over the old one
    hub.write_repository(repository)


def test_refuses_a_folder_of_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FileExistsError, match="no kernel repository"):
        hub.write_repository(tmp_path)


def test_loss_layer():
    """A loss function that is given the name "ForCausalLMLoss" runs ours."""
    loss = kernels.use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
    holder = kernels.use_kernelized_func(loss)(type("Holder", (torch.nn.Module,), {}))()
    logits = torch.randn(2, 5, 11, requires_grad=True)
    labels = torch.randint(0, 11, (2, 5))
    labels[0, 2] = -100
    for options in ({}, {"num_items_in_batch": 3}, {"num_items_in_batch": torch.tensor(3)}):
        expected = ForCausalLMLoss(logits, labels, 11, **options)
        with kernels.use_kernel_mapping(hub.kernel_mapping(), inherit_mapping=False):
            kernels.kernelize(holder, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu", use_fallback=False)
        assert loss.forward.__qualname__ == "LigerForCausalLMLossLayer.forward"
        torch.testing.assert_close(loss(logits, labels, 11, **options), expected)
        torch.testing.assert_close(torch.autograd.grad(loss(logits, labels, 11, **options), logits),
                                   torch.autograd.grad(expected, logits))


def test_layers_have_nothing_but_a_forward():
    for name in {*hub.LAYERS.values(), "LigerRMSNormRoundThenScale", "LigerRMSNormScaleThenRound", "LigerRMSNormZeroCentered"}:
        cls = getattr(layers, name)
        assert set(dir(cls)) - set(dir(torch.nn.Module)) == {"can_torch_compile", "has_backward"}
