"""`liger profile`: its numbers are consistent, its files complete, its errors name the remedy."""

import gzip
import json
import textwrap
import types

import pytest
import torch

pytest.importorskip("typer")
from typer.testing import CliRunner

from liger_kernel.cli.app import app
from liger_kernel.cli.profile import collect, phases, report, timeline
from liger_kernel.cli.step import configs
from liger_kernel.cli.step.kinds import PARTS


def liger(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "180", "OMP_NUM_THREADS": "1"}).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result.output


DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def check(document):
    """What must hold of every file."""
    assert set(document["arms"]) == {"hf", "patched"} and document["losses_agree"]
    for arm in document["arms"].values():
        assert arm["status"] == "ok" and len(arm["losses"]) == document["settings"]["warmup"] + document["settings"]["steps"]
        assert set(arm["shares"]) == set(PARTS) and sum(arm["shares"].values()) == pytest.approx(1)
        assert all(arm["parts_ms"][part] > 0 for part in PARTS if part not in ("copies", "other"))
        assert set(arm["peak_bytes"]) == set(phases.PHASES)
        standing = arm["state_bytes"]["weights"] + arm["state_bytes"]["optimizer"]
        assert all(peak >= standing for peak in arm["peak_bytes"].values())
        # Nothing is allocated by the optimizer's step: all gradients are there, and little else (on CUDA, the workspaces of cuBLAS).
        if document["device"] == "cpu":
            assert arm["peak_bytes"]["optimizer"] == pytest.approx(sum(arm["state_bytes"].values()), rel=0.02)
            assert arm["kernels"] is arm["launches"] is arm["idle"] is None
        else:
            assert arm["kernels"] > 50 and 0 < arm["launches"] <= arm["kernels"] + arm["driver_copies"]
            assert 0 <= arm["idle"]["longest_ms"] <= arm["idle"]["idle_ms"] < arm["idle"]["span_ms"]
            assert arm["idle"]["span_ms"] - arm["idle"]["idle_ms"] <= sum(arm["parts_ms"].values()) * 1.01
        assert arm["peak"] == max(arm["peak_bytes"].values()) and arm["operators"] > 50
    hf, patched = document["arms"]["hf"], document["arms"]["patched"]
    assert patched["operators"] < hf["operators"] and patched["peak"] < hf["peak"]


@pytest.mark.parametrize("device", DEVICES)
def test_profile(device, tmp_path):
    """Both arms, then the same page from the file, with the weights of a folder."""
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    from transformers import AutoModelForCausalLM

    folder, out, path = tmp_path / "model", tmp_path / "out", tmp_path / "profile.json"
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(configs.config_of(configs.numbers("tiny"))).save_pretrained(folder)
    assert "use_cache" in json.loads((folder / "config.json").read_text())  # as in published configurations
    assert "has 2 layers, --layers is 3" in liger("profile", folder, "--weights", "--device", "cpu", "--layers", 3, code=2)
    text = liger("profile", folder, "--weights", "--device", device, "--layers", 1, "--batch", 2, "--seq", 128, "--steps", 2, "--json",
                 path, "--out", out)
    cells = ("n/a on the CPU", "head + loss, time") if device == "cpu" else ("launches", "device idle", "head + loss, kernel time")
    for words in (*cells, "hf", "patched", "peak memory, backward", "operators called"):
        assert words in text
    assert text.strip().splitlines()[-1].startswith("patched: ") and "x the tokens/s" in text.strip().splitlines()[-1]
    document = json.loads(path.read_text())
    check(document)
    assert document["settings"]["weights"] == str(folder.resolve())
    page = (out / "profile.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and "http" not in page and document["verdict"].split(";")[0] in page
    for arm in ("hf", "patched"):
        assert json.loads(gzip.decompress((out / f"trace-{arm}.json.gz").read_bytes()))["traceEvents"]

    again = liger("profile", "--from", path, "--out", tmp_path / "again")
    assert again.strip().splitlines()[-1] == text.strip().splitlines()[-1]
    assert (tmp_path / "again" / "profile.html").read_text() == page
    document["arms"]["patched"]["losses"][-1] *= 2
    path.write_text(json.dumps(document))
    assert "THE LOSSES DISAGREE" in liger("profile", "--from", path, code=1)


@pytest.mark.parametrize(("arguments", "words"), [
    (("gpt-17", "--device", "cpu"), "is neither one of"),
    (("tiny", "--device", "tpu"), "is no device"),
    (("tiny", "--device", "cuda:99"), "is not there"),
    (("tiny", "--dtype", "int8"), "expected bfloat16 or float32"),
    (("tiny", "--device", "cpu", "--weights"), "no folder with weights"),
    (("--from", "x.json", "--json", "y.json"), "measures nothing: it has no use for --json"),
    (("llama3-8b", "--from", "x.json"), "it has no use for MODEL"),
])
def test_profile_refuses(arguments, words, tmp_path):
    text = liger("profile", *arguments, "--out", tmp_path / "out", code=2)
    assert words in " ".join(text.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [("profile", "tiny", "--out"), ("memory", "tiny", "--out"), ("numerics", "softmax", "--plots"),
                                       ("convergence", "tiny", "--out"), ("demo", "--out")])
def test_a_file_is_no_folder_for_reports(arguments, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in " ".join(liger(*arguments, tmp_path / "file", code=2).replace("│", " ").split())


@pytest.mark.parametrize(("content", "words"), [("{", "cannot be read"), ("[]", "has no settings"),
                                                ('{"settings": {}, "arms": {"hf": {"status": "ok", "parts_ms": {}}}, "name": "", '
                                                 '"device": "cpu"}', "has no peak_bytes")])
def test_files_of_another_kind_are_refused(content, words, tmp_path):
    (tmp_path / "x.json").write_text(content)
    result = CliRunner().invoke(app, ["profile", "--from", str(tmp_path / "x.json")])
    assert result.exit_code == 1 and words in result.output + str(result.exception)


def test_out_of_time_is_reported(tmp_path):
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    text = liger("profile", "tiny", "--device", "cpu", "--minutes", 0, "--out", tmp_path, "--json", tmp_path / "p.json", code=1)
    assert "hf: out of time; patched: out of time, so there is nothing to compare" in text
    assert "out of time" in liger("profile", "--from", tmp_path / "p.json", code=1)


@pytest.mark.parametrize(("spans", "expected"), [
    ([], (0, 0, 0, 0)),
    ([(0, 10)], (10, 0, 0, 0)),
    ([(2, 5), (5, 7)], (7, 2, 1, 2)),
    ([(8, 9), (0, 4), (1, 2), (3, 6)], (9, 2, 1, 2)),  # in any order, one inside another
    ([(1, 2), (5, 6)], (6, 4, 2, 3)),
])
def test_gaps(spans, expected):
    found = timeline.gaps(spans, 0)
    assert tuple(found[key] for key in ("span", "idle", "gaps", "longest")) == expected
    covered = {moment for start, end in spans for moment in range(start, end)}
    assert found["span"] == len(covered) + found["idle"]


def test_timeline_of_a_device():
    """Kernels, copies and the profiler's mirrored ranges, as CUDA reports them."""
    from torch.autograd import DeviceType

    def event(name, start, end, device=DeviceType.CPU, parent=None, annotation=False):
        span = types.SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return types.SimpleNamespace(name=name, time_range=span, device_type=device, cpu_parent=parent, is_user_annotation=annotation)

    linear = event("aten::linear", 100, 150)
    node = event("autograd::engine::evaluate_function: MmBackward0", 200, 260)
    events = [linear, event("aten::mm", 110, 140, parent=linear), event("cudaLaunchKernel", 120, 125), node,
              event("aten::mm", 210, 250, parent=node), event("cuLaunchKernelEx", 220, 225), event("cudaMemcpyAsync", 230, 235),
              event("gemm", 130, 1130, DeviceType.CUDA), event("Memcpy DtoD", 1630, 1730, DeviceType.CUDA),
              event("part: MLP", 90, 5000, DeviceType.CUDA), event("Optimizer.step#AdamW.step", 90, 5000, DeviceType.CUDA),
              event("anything", 90, 5000, DeviceType.CUDA, annotation=True)]
    found = timeline.facts(events, True)
    assert found["operators"] == 2 and found["launches"] == 2
    assert found["idle"] == {"span_ms": 1.63, "idle_ms": 0.53, "gaps": 2, "longest_ms": 0.5}


def test_peaks_by_phase():
    """Each phase's own maximum: a release belongs to no phase after it, what is held on entry counts."""
    changes = [(10, 100), (20, -100), (15, 50), (35, 10), (45, -40), (60, 5)]
    spans = [("forward", 5, 30), ("loss", 31, 40), ("backward", 41, 70)]
    assert phases.peaks_of_events(changes, spans, 1000) == {"forward": 1150, "loss": 1060, "backward": 1060}
    again = [*spans, ("forward", 71, 80), ("loss", 81, 90)]  # a second batch before the optimizer's step
    assert phases.peaks_of_events([*changes, (85, 500)], again, 1000) == {"forward": 1150, "loss": 1525, "backward": 1060}


def test_phases_without_a_decoder():
    """A model that has no decoder of its own: all of forward is "forward"."""
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(1000))

        def forward(self, input_ids, labels):
            return types.SimpleNamespace(loss=(self.weight * 2 * input_ids.sum()).sum())

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peaks = phases.peaks_of_a_step(model, optimizer, torch.zeros(1, 4, dtype=torch.long), 4000)
    assert set(peaks) == {"forward", "backward", "optimizer"} and peaks["forward"] >= 8000
    assert 8000 <= peaks["optimizer"] < 8200


def test_table_of_a_cuda_file(tmp_path):
    """A document as CUDA gives it: kernels, launches and idle gaps have rows."""
    arm = {"status": "ok", "parameters": 8, "tokens_per_s": 100.0, "median_s": 0.5, "low_s": 0.4, "high_s": 0.6, "losses": [1.0, 2.0],
           "kernels": 1234, "launches": 1300, "driver_copies": 5, "operators": 900,
           "idle": {"span_ms": 500.0, "idle_ms": 25.0, "gaps": 70, "longest_ms": 2.5}, "parts_ms": dict.fromkeys(PARTS, 50.0),
           "state_bytes": {"weights": 10, "gradients": 10, "optimizer": 20}, "peak_bytes": dict.fromkeys(phases.PHASES, 60)}
    fast = arm | {"tokens_per_s": 150.0, "low_s": 0.2, "high_s": 0.3, "parts_ms": dict.fromkeys(PARTS, 25.0) | {"norms": 1.0},
                  "peak_bytes": dict.fromkeys(phases.PHASES, 50)}
    document = {"name": "m", "device": "cuda:0", "settings": {"model": {}, "dtype": "bfloat16", "batch": 1, "seq": 2, "attention": "sdpa",
                "checkpointing": True}, "arms": {"hf": arm, "patched": fast}, "environment": {}, "date": "d", "commit": None}
    (tmp_path / "x.json").write_text(json.dumps(document))
    text = liger("profile", "--from", tmp_path / "x.json")
    for words in ("1,234", "1,300", "25.0 ms of 500 ms, 70 gaps, longest 2.50 ms", "norms, kernel time"):
        assert words in text
    report.derive(document)
    fast["high_s"] = 0.45
    assert "1.50x the tokens/s (step times overlap); norms" in report.verdict(document)
    fast["high_s"] = 0.3
    assert document["verdict"] == ("patched: 1.50x the tokens/s; norms 11 % -> 0.5 % of the step; peak memory above the model "
                                   "0.0 kB -> 0.0 kB")


MODEL = """
    import sys, torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def build():
        return LlamaForCausalLM(LlamaConfig(vocab_size=1024, hidden_size=64, intermediate_size=160, num_hidden_layers=1,
                                            num_attention_heads=4, num_key_value_heads=2))
"""
LOOP = """
    accumulated, steps = map(int, sys.argv[1:])
    model, frozen = build().train(), build().eval()
    unused = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(accumulated):
            ids = torch.randint(1024, (2, 96))
            with torch.no_grad():
                frozen(ids)
                model(ids)  # as old probabilities are made
            (model(input_ids=ids, labels=ids).loss / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.eval()
        model(ids)
        model.train()
        print("step", step, '{"event": "step"}', end=" ")
"""


def written(folder, *parts):
    path = folder / "train.py"
    path.write_text("".join(map(textwrap.dedent, parts)))
    return path


def one_arm(script, *arguments, arm="hf", steps=2):
    """(what collect says, [events]) of one arm."""
    events = []
    config = {"script": str(script), "arguments": [str(a) for a in arguments], "device": "cpu", "seed": 0, "warmup": 1, "steps": steps,
              "arm": arm, "trace": None}
    return collect("liger_kernel.cli.profile.script", config, 120, events.append), events


def test_script(tmp_path):
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    script = written(tmp_path, MODEL, LOOP)
    text = liger("profile", script, "--device", "cpu", "--steps", 2, "--json", tmp_path / "p.json", "--out", tmp_path / "out", "--", 2, 9)
    document = json.loads((tmp_path / "p.json").read_text())
    check(document)
    assert document["name"] == "train.py" and document["device"] == "cpu"
    assert {k: document["settings"][k] for k in ("model", "optimizer", "tokens", "dtype", "arguments")} == {
        "model": "LlamaForCausalLM", "optimizer": "SGD and AdamW", "tokens": 2 * 2 * 96, "dtype": "float32", "arguments": ["2", "9"]}
    assert "LigerRMSNorm" in document["arms"]["patched"]["patched"] and "train.py 2 9: LlamaForCausalLM" in text
    for arm in document["arms"].values():
        assert arm["tokens_per_s"] == pytest.approx(2 * 2 * 96 / arm["median_s"], rel=0.5)
    assert (tmp_path / "out" / "trace-patched.json.gz").exists()
    assert liger("profile", "--from", tmp_path / "p.json").strip().splitlines()[-1] == text.strip().splitlines()[-1]


HEAD = 1024 * 64 * 4  # bytes of the head's weight, as of the embedding's


@pytest.mark.parametrize("what", ["loss outside", "tuple", "embeddings"])
def test_what_scripts_do(what, tmp_path):
    """Losses computed outside, tuples, no token ids; frozen weights, gradients that are kept, an optimizer for each of two parameters;
    the working directory and stdout changed, an exception that a bare except takes for one."""
    pytest.importorskip("transformers")
    call = {"loss outside": "torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())",
            "tuple": "model(ids, labels=ids, return_dict=False)[0]",
            "embeddings": "model(input_ids=None, inputs_embeds=model.get_input_embeddings()(ids), labels=ids).loss"}[what]
    script = written(tmp_path, MODEL, f"""
        import os
        os.mkdir({str(tmp_path / "elsewhere")!r})
        os.chdir({str(tmp_path / "elsewhere")!r})
        sys.stdout = open("log", "w")
        model = build().train().requires_grad_(False)
        both = [model.lm_head.requires_grad_(), model.model.embed_tokens.requires_grad_()]
        optimizers = [torch.optim.AdamW(both[0].parameters(), lr=1e-3), torch.optim.SGD(both[1].parameters(), lr=1e-3)]
        try:
            for _ in range(20):
                ids = torch.randint(1024, (2, 96))
                {call}.backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
        except:
            sys.exit(1)
    """)
    state, events = one_arm(script, arm="patched")
    by_kind = {event["event"]: event for event in events}
    assert state == {"status": "ok"}, state
    assert by_kind["built"]["script"]["tokens"] == 2 * 96 and by_kind["built"]["script"]["optimizer"] == "AdamW and SGD"
    assert len(by_kind["timed"]["losses"]) == (0 if what == "loss outside" else 3)
    state, peaks = by_kind["memory"]["state_bytes"], by_kind["memory"]["peak_bytes"]
    assert state["gradients"] == 2 * HEAD and 2 * HEAD < state["optimizer"] < 2.1 * HEAD  # AdamW's moments of the head
    assert set(peaks) == {"forward", "loss", "backward", "optimizer"} and min(peaks.values()) >= sum(state.values())


@pytest.mark.parametrize(("arguments", "parts", "words"), [
    ((1, 3), (MODEL, LOOP), "ended after 3 training steps of LlamaForCausalLM, which is too few: 1 to warm up, 2 to time"),
    ((), (MODEL, "build()"), "made no torch optimizer of a transformers model's parameters"),
    ((), ("raise KeyError('lost')",), "KeyError: 'lost'"),
    (("--help",), (MODEL, "import argparse; argparse.ArgumentParser().parse_args()"), "train.py ended and made no torch optimizer"),
    ((), (MODEL, "torch.optim.SGD(build().parameters(), lr=1.0); input()"), "EOFError"),
    ((), (MODEL, "model = build(); torch.optim.SGD(model.parameters(), lr=1.0); model.model(torch.ones(1, 4, dtype=int)); sys.exit(4)"),
     "train.py ended with 4 without a call of LlamaForCausalLM in training"),
])
def test_scripts_that_cannot_be_measured(arguments, parts, words, tmp_path):
    pytest.importorskip("transformers")
    state, _ = one_arm(written(tmp_path, *parts), *arguments)
    assert state["status"] == "failed" and words in state["error"]


@pytest.mark.parametrize(("arguments", "words"), [
    (("none.py",), "none.py is no file"),
    (("train.py", "--batch", 2), "a script has no use for --batch"),
    (("train.py", "--no-checkpointing"), "a script has no use for --no-checkpointing"),
    (("tiny", "--device", "cpu", "--", "--epochs"), "only a script (*.py) takes arguments"),
])
def test_script_refuses(arguments, words, tmp_path):
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    assert words in " ".join(liger("profile", *arguments, "--out", tmp_path / "out", code=2).replace("│", " ").split())
