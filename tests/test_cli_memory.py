"""`liger memory`: the formulae against real models, measured peaks and the H200's files; the search; files and errors."""

import json
import pathlib
import re

import pytest
import torch

pytest.importorskip("typer")
from typer.testing import CliRunner

from liger_kernel.cli import memory
from liger_kernel.cli.app import app
from liger_kernel.cli.memory import formulas, report
from liger_kernel.cli.memory.formulas import ARMS, Shape, predict
from liger_kernel.cli.memory.saved import saved_bytes
from liger_kernel.cli.step import configs

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOLERANCE = 0.02  # of what a step adds to weights and optimizer states, fp32 on the CPU; docs/memory.md states it


def liger(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "200", "OMP_NUM_THREADS": "1"}).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result.output


# --- formulae -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", list(configs.PRESETS))
def test_parameters_are_those_of_the_model(name):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configs.config_of(configs.numbers(name)))
    shape = Shape.of(configs.numbers(name))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.tensors == len(list(model.parameters()))


def test_constants_of_the_fused_loss():
    """Those of the plan that the kernels follow, where this is a source tree."""
    path = ROOT / "src/liger_kernel/ops/fused_linear_cross_entropy/plan.h"
    if not path.exists():
        pytest.skip("no source tree")
    text = path.read_text()

    def constant(name):
        value = re.search(rf"int64_t {name} = ([^;]+);", text)[1]
        return eval(re.sub(r"int64_t\{(\d+)\}", r"\1", value), {})

    for device, name in (("cuda", "Cuda"), ("cpu", "Cpu")):
        assert formulas.LOGITS[device] == (constant(f"k{name}LogitsBytes"), constant(f"k{name}Smallest"), constant(f"k{name}Largest"))
    assert constant("kWidenBytes") == formulas.WIDEN


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(7, 64, 33), (510, 128, 2048), (5000, 64, 2048), (1024, 896, 151936), (16384, 64, 128256)])
def test_chunks_are_the_kernels(shape, dtype):
    from liger_kernel import _native

    plan = _native.explain("fused_linear_cross_entropy", list(shape), dtype, -1)[1]
    rows, hidden, vocab = shape
    size, chunks = formulas.chunk_rows(rows, hidden, vocab, 4 if dtype == "fp32" else 2, "cpu", native=f"products in {dtype}" in plan)
    assert plan.startswith(f"{chunks} chunks of {size} rows")


def test_prediction_of_the_h200s_measurements():
    """CUDA, as `liger bench step` measured it: the peak above weights, gradients and optimizer states within 0.1 %."""
    compared = 0
    for path in sorted((ROOT / "bench" / "results").glob("h200-step-*.json")):
        document = json.loads(path.read_text())
        s = document["settings"]
        for arm in set(ARMS) & set(document["arms"]):
            measured = document["arms"][arm]
            if "peak_above_state" in measured:
                p = predict(Shape.of(s["model"]), arm, s["batch"], s["seq"], s["dtype"], s["checkpointing"], "cuda")
                assert {key: p[key] for key in ("weights", "gradients", "optimizer")} == measured["state_bytes"]
                assert p["peak_above_model"] == pytest.approx(measured["peak_above_state"], rel=1e-3), f"{path.name} {arm}"
                compared += 1
    if not compared:
        pytest.skip("no source tree")


def test_predictions_are_ordered():
    """More tokens and more vocabulary never take less; checkpointing and the kernels never more."""
    shape = Shape.of(configs.PRESETS["qwen2-7b"])
    for device in ("cuda", "cpu"):
        for dtype in ("float32", "bfloat16"):
            for arm in ARMS:
                peaks = [predict(shape, arm, b, 512, dtype, True, device)["peak"] for b in (1, 2, 3, 8, 64)]
                assert peaks == sorted(peaks)
                kept = [predict(shape, arm, 4, 512, dtype, c, device)["kept"] for c in (True, False)]
                assert kept[0] < kept[1]
            hf, patched = (predict(shape, arm, 4, 4096, dtype, True, device) for arm in ARMS)
            assert patched["peak"] < hf["peak"] and patched["peak_above_model"] < hf["peak_above_model"]


@pytest.mark.parametrize("answer", [0, 1, 2, 3, 17, 100, 999, 1000])
@pytest.mark.parametrize("guess", [1, 3, 90, 1000])
def test_search(answer, guess):
    """Exact without a resolution, else below by no more than its share; a right guess takes two calls."""
    calls = []
    assert formulas.largest(lambda n: calls.append(n) or n <= answer, guess, most=1000) == answer
    assert all(1 <= n <= 1000 for n in calls)
    if guess == answer:
        assert len(calls) <= 2
    found = formulas.largest(lambda n: n <= answer, guess, resolution=0.1, most=1000)
    assert answer / 1.1 - 1 <= found <= answer


# --- saved bytes --------------------------------------------------------------------------------------------------------------

def test_saved_bytes_count_each_memory_once():
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    y = x @ w
    z = torch.sigmoid(y)
    loss = (z * z.view(4, 8)).exp().sum()
    found = {entry["op"]: entry for entry in saved_bytes(loss, [w])}
    # x for the product (the weight is no cost), sigmoid's result once though the product saves it twice more, exp's result.
    assert {op: (entry["tensors"], entry["bytes"]) for op, entry in found.items()} == {
        "Mm": (1, 128), "Sigmoid": (1, 128), "Exp": (1, 128)}


# --- the command --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("device", ["cpu"] + ["cuda"] * torch.cuda.is_available())
def test_memory(device, tmp_path):
    """Measured and predicted agree at every point, with both arms in the table, the plot and the file, and again from the file."""
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    path, out = tmp_path / "memory.json", tmp_path / "out"
    text = liger("memory", "tiny", "--device", device, "--layers", 2, "--batch", 2, "--seq", 128, "--vocabs", "4k,2k", "--seqs", "64,128",
                 "--json", path, "--out", out)
    last = text.strip().splitlines()[-1]
    assert last.startswith("patched: peak memory above the model") and "predictions within" in last
    document = json.loads(path.read_text())
    element = formulas.ELEMENT[document["settings"]["dtype"]]
    for arm in ARMS:
        points = document["arms"][arm]["points"]
        assert [(p["vocab"], p["seq"]) for p in points] == [(4096, 128), (2048, 64), (2048, 128)]
        for p in points:
            if device == "cpu":  # on CUDA, cuBLAS's workspaces are larger than this model
                assert abs(p["prediction_error"]) < TOLERANCE
                for phase, bytes in p["predicted"]["phases"].items():
                    assert bytes == pytest.approx(p["peak_bytes"][phase], rel=TOLERANCE)
            assert {key: p["predicted"][key] for key in ("weights", "gradients", "optimizer")} == p["state_bytes"]
        saved = document["arms"][arm]["saved"]
        tokens = saved["batch"] * saved["seq"]
        shape = Shape.of(document["settings"]["model"])
        layers = sum(formulas.layer_activations(shape, arm, element).values()) * shape.layers * tokens
        assert saved["error"] is None and layers < sum(op["bytes"] for op in saved["ops"])
    hf, patched = (document["arms"][arm] for arm in ARMS)
    assert any(op["op"] == "LogSoftmax" and op["bytes"] == 128 * 2048 * 4 for op in hf["saved"]["ops"])
    assert any("FusedLinearCrossEntropy" in op["op"] for op in patched["saved"]["ops"])
    assert all(a["peak"] > b["peak"] for a, b in zip(hf["points"], patched["points"], strict=True))
    page = (out / "memory.html").read_text()
    assert page.count("data:image/png;base64,") == 1 and "http" not in page

    again = liger("memory", "--from", path, "--out", tmp_path / "again")
    assert again.strip().splitlines()[-1] == last
    assert (tmp_path / "again" / "memory.html").read_text() == page


def test_fit(tmp_path):
    """The largest batch within a limit: it fits, one more does not, and the prediction is close."""
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    path = tmp_path / "fit.json"
    text = liger("memory", "tiny", "--device", "cpu", "--layers", 1, "--seq", 64, "--fit", "batch", "--limit", "40MB", "--json", path,
                 "--out", tmp_path)
    document = json.loads(path.read_text())
    hf, patched = (document["arms"][arm] for arm in ARMS)
    for arm in (hf, patched):
        tried = {t["n"]: t for t in arm["tries"]}
        best = arm["fit"]["largest"]
        assert tried[best]["fits"] and tried[best]["peak"] <= 40e6 < tried[best + 1]["peak"]
        assert abs(arm["fit"]["predicted"] - best) <= 1
    assert patched["fit"]["largest"] > hf["fit"]["largest"] > 1
    assert f"{hf['fit']['largest']} -> {patched['fit']['largest']}" in text.strip().splitlines()[-1]
    assert liger("memory", "--from", path).strip().splitlines()[-1] == text.strip().splitlines()[-1]


def test_a_model_without_formula(tmp_path):
    """It is measured all the same."""
    for package in ("transformers", "matplotlib"):
        pytest.importorskip(package)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1, "intermediate_size": 96, "vocab_size": 512}))
    text = liger("memory", tmp_path, "--device", "cpu", "--seq", 32, "--vocabs", "1k", "--seqs", "32", "--out", tmp_path)
    assert "no formula" in text and "patched: peak memory above the model" in text and "predictions within" not in text


def test_out_of_memory_is_a_result():
    """A point that does not fit is named so; the others count."""
    def point(vocab, **more):
        return {"vocab": vocab, "batch": 1, "seq": 64, "status": "ok", "state_bytes": {"weights": 4, "gradients": 4, "optimizer": 8}} | more

    settings = {"model": configs.numbers("tiny"), "batch": 1, "seq": 64, "dtype": "float32", "checkpointing": True, "device": "cpu",
                "fit": None}
    lost = {key: value for key, value in point(4096, status="out of memory", error="x").items() if key != "state_bytes"}
    document = {"name": "tiny", "device": "cpu", "settings": settings, "arms": {
        "hf": {"status": "ok", "points": [point(2048, peak_bytes={"forward": 900}), lost]},
        "patched": {"status": "ok", "points": [point(n, peak_bytes={"forward": 500}) for n in (2048, 4096)]}}}
    report.derive(document)
    assert "0.9 kB -> 0.5 kB at 1 x 64 tokens, out of memory -> 0.5 kB at a vocabulary of 4,096" in document["verdict"]
    assert any("out of memory" in row for row in report.points_section(document)[2])


@pytest.mark.parametrize(("arguments", "words"), [
    (("gpt-17", "--device", "cpu"), "is neither one of"),
    (("tiny", "--device", "tpu"), "is no device"),
    (("tiny", "--device", "cuda:99"), "is not there"),
    (("tiny", "--dtype", "int8"), "expected bfloat16 or float32"),
    (("tiny", "--device", "cpu", "--vocabs", "32q"), "expected numbers joined by commas"),
    (("tiny", "--device", "cpu", "--seqs", "1"), "of at least 2"),
    (("tiny", "--device", "cpu", "--fit", "layers"), "expected batch or seq"),
    (("tiny", "--device", "cpu", "--limit", "1GB"), "belongs to --fit"),
    (("tiny", "--device", "cpu", "--fit", "batch", "--limit", "much"), "is no size"),
    (("tiny", "--device", "cpu", "--fit", "batch", "--vocabs", "32k"), "--fit batch has no use for --vocabs"),
    (("tiny", "--device", "cpu", "--fit", "batch", "--batch", 3), "--fit batch has no use for --batch"),
    (("--predict", "--minutes", 3), "--predict has no use for --minutes"),
    (("--predict", "--fit", "batch"), "--predict has no use for --fit"),
    (("tiny", "--predict"), "--predict has no use for MODEL"),
    (("--from", "x.json", "--json", "y.json"), "measures nothing"),
])
def test_memory_refuses(arguments, words, tmp_path):
    assert words in " ".join(liger("memory", *arguments, "--out", tmp_path / "out", code=2).replace("│", " ").split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("content", "words"), [("{", "cannot be read"), ("[]", "has no settings"),
                                                ('{"settings": {}, "arms": {"hf": {}}, "name": "", "device": "cpu"}', "has no points")])
def test_files_of_another_kind_are_refused(content, words, tmp_path):
    (tmp_path / "x.json").write_text(content)
    result = CliRunner().invoke(app, ["memory", "--from", str(tmp_path / "x.json")])
    assert result.exit_code == 1 and words in result.output + str(result.exception)


def test_sizes():
    assert [memory.parse_bytes(t) for t in ("1000", "80GB", "256 MiB", "1.5g", "2kB")] == [1000, 80 * 10**9, 1 << 28, 15 * 10**8, 2000]
    assert memory.parse_numbers("1M,32k,7,7", "") == [7, 32768, 1 << 20]


def test_predicted_table():
    """It needs no device, and docs/memory.md shows it as the code computes it."""
    text = liger("memory", "--predict")
    assert text.count("llama3-8b") == 6 and "1,048,576" in text
    if (ROOT / "docs" / "memory.md").exists():
        assert report.markdown(report.predicted_section(4, 4096, True)) in (ROOT / "docs" / "memory.md").read_text()
