"""`liger numerics`: it measures what the ops' own checks compare, sees a wrong kernel and a wrong module, and reads its own files."""

import json

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
from typer.testing import CliRunner

from liger_kernel.cli import numerics
from liger_kernel.cli.app import app
from liger_kernel.cli.numerics import grid, measure
from liger_kernel.core import accuracy


def liger(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "180"}).invoke(app, ["numerics", *map(str, arguments)])
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result.output


def test_every_op_takes_part():
    assert [op for op, module in numerics.known().items() if module is None] == []


def test_measures_draws_and_reads_its_file(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "numbers.json"
    text = liger("relu_squared", "selective_log_softmax", "--device", "cpu", "--dtype", "bf16", "--json", path, "--plots", tmp_path)
    assert text.strip().splitlines()[-1].startswith("PASS: ") and "of bound" in text
    assert (tmp_path / "numerics.png").read_bytes()[:4] == b"\x89PNG"
    document = json.loads(path.read_text())
    rows = document["results"]
    assert {row["op"] for row in rows} == {"relu_squared", "selective_log_softmax"} and {row["dtype"] for row in rows} == {"bfloat16"}
    assert {row["regime"] for row in rows} == set(grid.REGIMES) and {row["pass"] for row in rows} == {"forward", "gradient"}
    assert all(row["ours"]["of_bound"] <= 1 and row["failed"] is None for row in rows) and document["environment"]["torch"]
    again = liger("--from", path, "--plots", tmp_path / "again")
    assert again.strip().splitlines()[-1] == text.strip().splitlines()[-1]
    assert (tmp_path / "again" / "numerics.png").read_bytes() == (tmp_path / "numerics.png").read_bytes()
    assert "relu_squared" not in liger("selective_log_softmax", "--from", path)


def test_a_wrong_kernel_is_found(monkeypatch, tmp_path):
    from liger_kernel.ops.relu_squared import test_relu_squared as checks

    true = checks.liger_relu_squared
    monkeypatch.setattr(checks, "liger_relu_squared", lambda x: true(x) * 1.01)
    path = tmp_path / "wrong.json"
    text = liger("relu_squared", "--device", "cpu", "--dtype", "fp32", "--json", path, code=1)
    assert "FAIL" in text and "relu_squared float32 typical" in text
    assert "FAIL" in liger("--from", path, code=1)
    monkeypatch.setattr(checks, "liger_relu_squared", lambda x: 1 / 0)
    assert "ZeroDivisionError" in liger("relu_squared", "--device", "cpu", "--dtype", "fp32", code=1)


def test_modules_and_a_wrong_one(monkeypatch):
    pytest.importorskip("transformers")
    from liger_kernel import patch
    from liger_kernel.cli.numerics.modules import gate

    rows = gate("cpu")
    assert {row["module"] for row in rows} == {"norm", "mlp", "rotation", "loss head", "q_proj", "k_proj", "v_proj", "o_proj"}
    assert [row for row in rows if not row["passes"]] == []
    assert all(row["same_bits"] == 1 for row in rows if row["exact"])
    true = patch.patch_model

    def wrong(model):
        true(model)
        model.get_submodule("model.layers.0.mlp").register_forward_hook(lambda module, args, output: output * 1.02)

    monkeypatch.setattr(patch, "patch_model", wrong, raising=False)
    assert {row["module"] for row in gate("cpu") if not row["passes"] and not row["gradient"]} == {"mlp"}


def test_units_in_the_last_place():
    truth = torch.tensor([1.0, 1.5, 2.0, -4.0, 0.0], dtype=torch.float64)
    step = torch.tensor([2.0**-7, 2.0**-7, 2.0**-6, 2.0**-5, accuracy.SMALLEST[torch.bfloat16]], dtype=torch.float64)
    assert torch.equal(measure.ulps_of(step, truth, torch.bfloat16), torch.ones(5, dtype=torch.float64))


def test_recording_raises_nothing_and_ends():
    from liger_kernel.ops.softmax import cases

    true = cases.assert_accurate
    with measure.recording() as rows:
        cases.assert_accurate(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0], dtype=torch.float64), 1e-6, what="dx")
        cases.assert_accurate(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6], dtype=torch.float64), 1e-6, what="y")
    assert cases.assert_accurate is true
    assert [row["pass"] for row in rows] == ["gradient", "forward"] and [bool(row["failed"]) for row in rows] == [True, False]
    assert rows[0]["ours"]["of_bound"] == measure.LARGEST_RATIO and 0.8 < rows[1]["ours"]["of_bound"] < 1


@pytest.mark.parametrize(("arguments", "words"), [
    (("nothing",), "no op is called nothing"),
    (("--dtype", "int8"), "expected some of fp32,bf16,fp16"),
    (("--device", "tpu"), "is no device"),
    (("--device", "cuda:99"), "is not there"),
    (("--from", "x.json", "--json", "y.json"), "it has no use for --json"),
])
def test_refuses(arguments, words):
    assert words in liger(*arguments, code=2)


def test_refuses_other_files(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    assert "was not written by `liger numerics --json`" in CliRunner().invoke(app, ["numerics", "--from", str(tmp_path / "x.json")]).output
