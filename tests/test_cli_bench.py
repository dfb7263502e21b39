"""`liger bench step`, and the files and plots of `liger bench`."""

import json
import pathlib
import sys
import time
import types

import pytest
import torch

pytest.importorskip("typer")
from typer.testing import CliRunner

from liger_kernel.cli.app import app
from liger_kernel.cli.child import Child
from liger_kernel.cli.step import configs, kinds, report


def liger(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "180", "OMP_NUM_THREADS": "1"}).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result.output


# --- liger bench step --------------------------------------------------------------------------------------------------------

TINY = ("--device", "cpu", "--layers", 1, "--batch", 2, "--seq", 256, "--steps", 2, "--warmup", 1)


def test_step(tmp_path):
    """Two arms from the same weights on the same data; every number is in the file, and the file gives table and plot again."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.json"
    text = liger("bench", "step", "tiny", *TINY, "--arms", "hf,patched", "--json", path, "--plots", tmp_path / "a")
    for words in ("hf: step 3 of 3", "patched: ok", "tokens/s", "peak above these", "MLP activation, time", "the losses agree"):
        assert words in text
    document = json.loads(path.read_text())
    assert document["device"] == "cpu" and document["environment"]["torch"] and "commit" in document
    hf, patched = document["arms"]["hf"], document["arms"]["patched"]
    assert document["max_loss_difference"] < 1e-5 and hf["parameters"] == patched["parameters"]
    for result in (hf, patched):
        assert result["status"] == "ok" and len(result["losses"]) == len(result["seconds"]) == 3
        assert result["state_bytes"]["weights"] == 4 * result["parameters"]
        assert 2 * result["state_bytes"]["weights"] <= result["state_bytes"]["optimizer"] < 2.1 * result["state_bytes"]["weights"]
        assert result["peak_allocated"] == sum(result["state_bytes"].values()) + result["peak_above_state"]
        assert set(result["parts_ms"]) == set(kinds.PARTS)
        assert all(result["parts_ms"][part] > 0 for part in kinds.PARTS if part not in ("copies", "other"))
    assert patched["peak_above_state"] < hf["peak_above_state"] and "LigerRMSNorm" in patched["patched"]
    again = liger("bench", "step", "--from", path, "--plots", tmp_path / "b")
    assert "the losses agree" in again and "starting" not in again
    assert (tmp_path / "a" / "step.png").stat().st_size == (tmp_path / "b" / "step.png").stat().st_size > 1000


def test_step_out_of_memory_is_a_result(monkeypatch):
    """The worker knows the error by its cause, and the command reports it as a status."""
    pytest.importorskip("transformers")
    from liger_kernel.cli import step
    from liger_kernel.cli.step import worker

    config = dict(arm="hf", device="cpu", dtype="float32", attention="sdpa", checkpointing=False, seed=0, warmup=1, steps=1, batch=10**10,
                  seq=128, model=configs.numbers("tiny", 1))
    with pytest.raises(RuntimeError) as caught:
        worker.main(config)
    wrapped = ValueError("the compiler failed")
    wrapped.__cause__ = caught.value
    assert worker.out_of_memory(caught.value) and worker.out_of_memory(wrapped) and worker.out_of_memory(torch.OutOfMemoryError("full"))
    assert not worker.out_of_memory(RuntimeError("wrong shape"))

    def child(code):
        monkeypatch.setattr(step, "Child", lambda command, env: Child([sys.executable, "-c", code]))
        return step.run_arm(config, 60, lambda text: None)

    event = json.dumps({"event": "out of memory", "error": "full"})
    assert child(f"from liger_kernel.cli.child import emit; emit(**{json.loads(event)!r})") == {"status": "out of memory", "error": "full"}
    assert child("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")["status"] == "out of memory"
    failed = child("raise KeyError('lost')")
    assert failed["status"] == "failed" and "KeyError: 'lost'" in failed["error"]


def test_step_stops_in_time():
    assert "out of time" in liger("bench", "step", "tiny", "--device", "cpu", "--minutes", 0, "--arms", "hf", code=1)
    child = Child([sys.executable, "-c", "from liger_kernel.cli.child import emit; import time; emit(event='a'); time.sleep(60)"])
    start = time.monotonic()
    assert [e["event"] for e in child.events(4)] == ["a"] and child.stopped and child.failure()
    assert time.monotonic() - start < 20


def test_worker_that_leaves_a_process_behind():
    """Neither waited for nor left; what the worker prints, in any encoding, is no event."""
    code = ("import subprocess, sys; from liger_kernel.cli.child import emit; sys.stdout.buffer.write(b'\\xff{}\\n');"
            "sys.stderr.buffer.write(b'\\xff lost');"
            "emit(event='a', pid=subprocess.Popen(['sleep', '60']).pid); sys.exit(3)")
    child, start = Child([sys.executable, "-c", code]), time.monotonic()
    (event,) = child.events()
    assert time.monotonic() - start < 20 and child.failure().startswith("exit code 3: ") and "lost" in child.failure()
    for _ in range(50):  # until the kernel has taken it away
        state = pathlib.Path(f"/proc/{event['pid']}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the worker's process lives on")


@pytest.mark.parametrize(("arguments", "words"), [
    (("no-such-model",), "is neither one of llama3-8b"),
    (("tiny", "--arms", "hf,fast"), "--arms is 'hf,fast'"),
    (("tiny", "--arms", "hf,hf"), "each once"),
    (("tiny", "--dtype", "int8"), "--dtype is 'int8'"),
    (("--from", "x.json", "--json", "y.json"), "it has no use for --device, --json"),
])
def test_step_refuses(arguments, words):
    assert words in liger("bench", "step", *arguments, "--device", "cpu", code=2)


def test_configurations(tmp_path):
    """Presets have the published sizes; a folder's config.json is read, and cut to fewer layers with what is listed per layer."""
    transformers = pytest.importorskip("transformers")
    sizes = {"llama3-8b": 8_030_261_248, "qwen2-7b": 7_615_616_512, "qwen2-0.5b": 494_032_768}  # of the published checkpoints
    for name, size in sizes.items():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(configs.config_of(configs.numbers(name)))
        assert sum(p.numel() for p in model.parameters()) == size
    entries = configs.numbers("qwen2-0.5b") | {"layer_types": ["full_attention"] * 24, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    config = configs.config_of(configs.numbers(str(tmp_path), 3))
    assert config.num_hidden_layers == 3 and config.hidden_size == 896
    assert configs.numbers(str(tmp_path / "config.json")) == entries
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="names no model_type"):
        configs.numbers(str(tmp_path))


@pytest.mark.parametrize(("name", "shapes", "part", "compiled", "expected"), [
    ("aten::mm", (), "attention", False, "GEMMs"),
    ("aten::mm", (), "head + loss", False, "head + loss"),
    ("aten::bmm", (), "attention", False, "attention"),
    ("aten::copy_", (), "norms", False, "norms"),
    ("aten::copy_", (), "attention", False, "copies"),
    ("aten::silu", (), "MLP", False, "MLP activation"),
    ("aten::mul", (), "rope", False, "RoPE"),
    ("aten::add_", (), "optimizer", True, "optimizer"),
    ("aten::mm", ([8, 64], [64, 512]), "other", True, "head + loss"),
    ("aten::mm", ([8, 64], [64, 128]), "other", True, "GEMMs"),
    ("aten::_flash_attention_backward", (), "other", True, "attention"),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", (), "other", True, "norms"),
    ("triton_poi_fused_mul_silu_5", (), "other", True, "MLP activation"),
    ("triton_red_fused__log_softmax_nll_loss_forward_2", (), "other", True, "head + loss"),
    ("triton_poi_fused__to_copy_add_cat_mul_neg_slice_7", (), "other", True, "RoPE"),
    ("triton_poi_fused_clone_1", (), "other", True, "copies"),
])
def test_kinds(name, shapes, part, compiled, expected):
    assert kinds.kind(name, shapes, part, compiled, 512) == expected


def test_kernels_are_booked_once():
    """CUDA: each kernel goes to the operator that launched it; mirrored ranges are no kernels; the unclaimed rest is other."""
    from torch.autograd import DeviceType

    def event(name, device=DeviceType.CPU, parent=None, kernels=(), start=0, us=0.0, annotation=False):
        return types.SimpleNamespace(
            name=name, device_type=device, cpu_parent=parent, kernels=kernels, sequence_nr=-1, thread=1, fwd_thread=0, input_shapes=(),
            is_user_annotation=annotation, time_range=types.SimpleNamespace(start=start, elapsed_us=lambda: us))

    def kernel(name, us):
        return types.SimpleNamespace(name=name, duration=us)

    mlp = event("part: MLP", kernels=[kernel("part: MLP", 99.0)])
    events = [
        mlp, event("aten::mm", parent=mlp, kernels=[kernel("nvjet_gemm", 5.0)], start=1),
        event("aten::silu", parent=mlp, kernels=[kernel("elementwise", 2.0)], start=2),
        event("nvjet_gemm", DeviceType.CUDA, us=5.0), event("elementwise", DeviceType.CUDA, us=2.0),
        event("unclaimed", DeviceType.CUDA, us=1.0), event("Memset (Device)", DeviceType.CUDA, us=0.5),
        event("part: MLP", DeviceType.CUDA, us=99.0), event("a range", DeviceType.CUDA, us=99.0, annotation=True)]
    total, kernels, moved = kinds.table(events, True, False, 512)
    assert (kernels, moved) == (3, 1)
    assert {part: us for part, us in total.items() if us} == {"GEMMs": 5.0, "MLP activation": 2.0, "other": 1.5}


def test_recomputation_keeps_the_parts():
    """Under checkpointing the ranges open again in backward, and close when recomputation stops early."""
    pytest.importorskip("transformers")
    from liger_kernel.cli.demo.parts import attributed, marked
    from liger_kernel.cli.step import worker

    config = dict(arm="hf", device="cpu", dtype="float32", attention="sdpa", checkpointing=True, seed=0, model=configs.numbers("tiny", 1))
    model = worker.build(config)
    batch = torch.randint(2048, (1, 16))
    with marked(model), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(input_ids=batch, labels=batch).loss.backward()
    found = attributed(profile.events())

    def count(name, part):
        return sum(e.name == name and p == part for e, p in found)

    assert count("aten::mm", "MLP") >= 3 + 2 + 6  # forward, again (it stops before down_proj, whose output no one needs), backward
    assert count("aten::mm", "attention") == 4 + 4 + 8
    assert count("aten::mm", "head + loss") == 3 and count("aten::mm", "other") == 0


def test_losses_that_disagree_or_are_nan_are_named():
    def arm(*losses):
        return {"status": "ok", "median_s": 1.0, "tokens_per_s": 1.0, "peak_above_state": 1, "losses": losses}

    for other, agree in (((1.0, 1.0), True), ((1.0, 1.1), False), ((1.0, float("nan")), False)):
        document = {"settings": {"dtype": "float32"}, "arms": {"hf": arm(1.0, 1.0), "patched": arm(*other)}}
        report.derive(document)
        assert document["losses_agree"] == agree


# --- files and plots of liger bench ------------------------------------------------------------------------------------------

@pytest.fixture
def numbers(tmp_path):
    """A file as an earlier `liger bench` wrote it, without the rates."""
    def contender(ms):
        return {"kernel_ms": {"median": ms, "low": ms, "high": ms}, "wall_ms": {"median": ms, "low": ms, "high": ms}, "peak_bytes": 10}

    def row(op, kind, flops):
        return {"op": op, "case": "8x8", "pass": kind, "heap": None, "bytes": 4_000_000, "flops": flops, "copy_gb_s": 4000.0,
                "gemm_tflop_s": 700.0 if flops else None, "contenders": {"liger": contender(0.002), "eager": contender(0.008)}}

    path = tmp_path / "bench.json"
    results = [row("one", "forward", 0), row("one", "forward+backward", 0), row("two", "forward", 700_000_000)]
    path.write_text(json.dumps({"device": "cuda:0", "results": results, "failures": []}))
    return path


def test_bench_from_file(numbers, tmp_path):
    pytest.importorskip("matplotlib")
    text = liger("bench", "--from", numbers, "--plots", tmp_path / "plots")
    assert "one on cuda:0" in text and "50%" in text and "4.00x" in text
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == ["one.png", "two.png"]
    assert "two on" not in liger("bench", "one", "--from", numbers)
    assert "has no three" in liger("bench", "three", "--from", numbers, code=2)
    assert "no case matches" in liger("bench", "--from", numbers, "--match", "9x9", code=2)
    assert "no use for --json" in liger("bench", "--from", numbers, "--json", tmp_path / "x.json", code=2)


def test_bench_rates(numbers):
    from liger_kernel.cli.bench.report import derive

    results = json.loads(numbers.read_text())["results"]
    derive(results, "cuda:0")
    memory, product = results[0]["contenders"]["liger"], results[2]["contenders"]["eager"]
    assert (memory["us"], memory["gb_s"], memory["share_of_copy"]) == pytest.approx((2, 2000, 0.5)) and "tflop_s" not in memory
    assert (product["us"], product["tflop_s"], product["share_of_gemm"]) == pytest.approx((8, 87.5, 0.125))


def test_files_of_another_kind_are_refused(numbers, tmp_path):
    for command, path, words in ((("bench", "step"), numbers, "has no settings, arms, name"), (("bench",), tmp_path, "cannot be read")):
        result = CliRunner().invoke(app, [*command, "--from", str(path)])
        assert result.exit_code == 1 and words in result.output + str(result.exception)


def test_commands_share_their_options():
    helps = [liger("bench", command, "--help") for command in ("ops", "step")]
    for option in ("--device", "--json", "--plots", "--from"):
        assert all(option in text for text in helps)
    assert "step" in liger("bench", "--help") and "ops" in liger("bench", "--help")
