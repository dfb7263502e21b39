"""The `liger` command: every subcommand runs, says what it should, and fails with the remedy."""

import ast
import json
import shutil
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer")
from typer.testing import CliRunner

from liger_kernel.cli import require
from liger_kernel.cli.app import app


def liger(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "180"}).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
    return result.output


def test_help_lists_every_command():
    text = liger("--help")
    for command in ("doctor", "ops", "explain", "models", "bench", "profile", "memory", "numerics", "convergence", "demo", "hub", "new-op"):
        assert command in text


def test_version():
    from liger_kernel import __version__

    assert liger("--version").strip() == __version__


def test_doctor():
    text = liger("doctor")
    for words in ("liger-kernel", "torch", "transformers", "CUDA driver", "Kernels see", "rms_norm", "The kernels work."):
        assert words in text


def test_doctor_says_what_is_broken(monkeypatch):
    from liger_kernel.cli import doctor

    monkeypatch.setattr(doctor, "self_check", lambda device: "off by one")
    text = liger("doctor", code=1)
    assert "broken" in text and "off by one" in text and "The kernels work" not in text


def test_ops_and_explain():
    assert "cpu_avx2" in liger("ops")
    text = liger("explain", "rms_norm", "8192x4096", "bf16", "cpu")
    assert "chosen" in text and "runs on another back end" in text and "plan:" in text


@pytest.mark.parametrize(("arguments", "words"), [
    (("rms_norm", "8192", "bf16", "cpu"), "expected rows x columns"),
    (("rms_norm", "8192x", "bf16", "cpu"), "not numbers joined by x"),
    (("rms_norm", "99999999999999999999x5", "bf16", "cpu"), "more elements than 64 bits count"),
    (("rms_norm", "4294967296x4294967296", "bf16", "cpu"), "more elements than 64 bits count"),
    (("rms_norm", "99999999999999999999x0", "bf16", "cpu"), "more elements than 64 bits count"),
    (("rms_norm", "8x8", "int8", "cpu"), "fp32, bf16 or fp16"),
    (("nothing", "8x8", "bf16", "cpu"), "no op is called nothing"),
    (("llama4_rope", "8x8", "bf16", "cpu"), "has no kernels of its own"),
    (("rms_norm", "8x8", "bf16", "tpu"), "is no device"),
    (("rms_norm", "8x8", "bf16", "cuda:99"), "is not there"),
])
def test_explain_refuses(arguments, words):
    assert words in liger("explain", *arguments, code=2)


def test_models(tmp_path):
    """The table of one type and its file; an unknown type is an error that lists the known ones."""
    pytest.importorskip("transformers")
    text = liger("models", "llama", "--device", "cpu", "--json", tmp_path / "models.json")
    assert "LigerRMSNorm" in text and json.loads((tmp_path / "models.json").read_text())["models"][0]["model_type"] == "llama"
    assert "no row for no_such_model; there are" in liger("models", "no_such_model", code=2)
    assert "is no device" in liger("models", "llama", "--device", "tpu", code=2)


OTHER = """
import torch
class LigerRMSNormFunction:
    @staticmethod
    def apply(x, w, eps, offset, mode, in_place):
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps)
"""


def test_bench(tmp_path):
    """One small case beside another package's function of the same public name, in processes that take turns."""
    other, path = tmp_path / "other", tmp_path / "bench.json"
    (other / "liger_kernel" / "ops").mkdir(parents=True)
    (other / "liger_kernel" / "__init__.py").write_text("")
    (other / "liger_kernel" / "ops" / "__init__.py").write_text(OTHER)
    text = liger("bench", "rms_norm", "--device", "cpu", "--match", "1x4096", "--rounds", 3, "--no-compile", "--heap", "warm", "--json",
                 path, "--against", other)
    assert "forward+backward" in text and "warm heap" in text and "against eager" in text
    document = json.loads(path.read_text())
    assert document["environment"]["torch"].startswith(torch.__version__.split("+")[0]) and document["failures"] == []
    assert [r["pass"] for r in document["results"]] == ["forward", "forward+backward"]
    for row in document["results"]:
        assert row["copy_gb_s"] > 0
        assert set(row["contenders"]) == {"liger", "eager", "torch", "against", "against eager"}
        for contender in row["contenders"].values():
            stats = contender["wall_ms"]
            assert 0 < stats["low"] <= stats["median"] <= stats["high"]
            assert contender["ratio"] > 0 and contender["peak_bytes"] >= 4096 * 4


def test_bench_refuses():
    assert "no bench.py for nothing" in liger("bench", "nothing", code=2)
    assert "expected warm" in liger("bench", "--heap", "hot", code=2)
    assert "has no folder liger_kernel" in liger("bench", "--against", "/", code=2)
    assert "no case matches" in liger("bench", "rms_norm", "--device", "cpu", "--match", "no such shape", "--heap", "warm", code=2)


def test_peak_memory_counts_what_is_alive_at_once():
    from liger_kernel.cli.bench.memory import peak_extra

    x = torch.randn(1 << 20)
    assert peak_extra(lambda: x * 2 * 3 + 0, "cpu") in range(2 * x.nbytes, 2 * x.nbytes + 4096)
    assert peak_extra(lambda: x * 2, "cpu") in range(x.nbytes, x.nbytes + 4096)


def test_time_by_part_books_backward_on_its_cause():
    """Backward work belongs to the range in which its forward ran, also without a range of its own."""
    from liger_kernel.cli.demo.parts import PREFIX, by_part

    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with torch.profiler.record_function(PREFIX + "MLP"):
            y = x
            for _ in range(40):
                y = y @ w
        with torch.profiler.record_function(PREFIX + "norms"):
            loss = y.tanh().sum()
        loss.backward()
    events = profile.events()
    total = by_part(events, False)
    forward = sum(e.self_cpu_time_total for e in events if e.name == "aten::mm") / 3  # two of three products are backward's
    assert total["MLP"] > 2.5 * forward and total["norms"] > 0
    assert total["other"] < 0.2 * sum(total.values())


def test_demo(tmp_path):
    """Two tiny runs, one after the other; the losses agree and the report is complete."""
    for package in ("transformers", "tokenizers", "matplotlib"):
        pytest.importorskip(package)
    text = liger("demo", "--device", "cpu", "--steps", 5, "--batch", 2, "--seq", 32, "--hidden", 64, "--layers", 1, "--vocab", 400, "--out",
                 tmp_path)
    assert "the loss curves agree" in text and "largest relative difference of the loss" in text
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["found"]["max_loss_difference"] < 1e-4
    for run in document["results"].values():
        assert len(run["losses"]) == 5 and run["state_bytes"] > 0
        assert all(run["parts_ms"][part] > 0 for part in ("attention", "norms", "rope", "MLP", "head + loss", "optimizer"))
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "http" not in page
    assert (tmp_path / "loss.png").stat().st_size > 1000 and (tmp_path / "parts.png").stat().st_size > 1000


def test_hub(tmp_path):
    """One line a variant; over an older repository; not over other files."""
    repository = tmp_path / "repository"
    (line,) = liger("hub", repository, "--no-bundle").split()
    assert line == str(repository / "build" / "torch-universal") and (repository / "README.md").exists()
    lines = liger("hub", repository).split()
    assert lines[0] == line and len(lines) >= 2
    assert all((repository / "build" / variant / "liger_kernel" / "_C.abi3.so").exists() for variant in lines[1:])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    for taken in (tmp_path / "other", tmp_path / "other" / "file"):
        liger("hub", taken, code=2)
        assert (tmp_path / "other" / "file").read_text() == ""


def test_new_op(tmp_path):
    """A complete folder, whose Python parses, whose C++ compiles, and beside which nothing changed."""
    ops = tmp_path / "liger_kernel" / "ops"
    ops.mkdir(parents=True)
    liger("new-op", "my_scale", "--into", ops)
    folder = ops / "my_scale"
    assert {p.name for p in folder.iterdir()} == {
        "README.md", "__init__.py", "bench.py", "cases.py", "cpu.isa.cpp", "cuda.cu", "my_scale.cpp", "my_scale.h",
        "numerics.py", "ref.py", "test.cpp", "test_my_scale.py", "torch.cpp", "variants.inc"}
    assert list(ops.iterdir()) == [folder]
    for path in folder.iterdir():
        assert "@" not in path.read_text().replace("@pytest", "").replace("@register_fake", "").replace("@staticmethod", ""), path.name
        if path.suffix == ".py":
            ast.parse(path.read_text())
    assert 'EXPORTS = ["LigerMyScaleFunction"]' in (folder / "__init__.py").read_text()
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler:
        from liger_kernel.cli import new_op

        source = new_op.TEMPLATES.parents[2]  # core's headers, where this is a source tree
        if (source / "liger_kernel/core/host.h").exists():
            done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", f"-I{tmp_path}", f"-I{source}", folder / "my_scale.cpp"],
                                  capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["MyScale", "2d", "a__b", "core", "lambda", "../x", "a-b"])
def test_new_op_refuses_names(name, tmp_path):
    assert "cannot name an op" in liger("new-op", name, "--into", tmp_path, code=2)
    assert list(tmp_path.iterdir()) == []


def test_new_op_does_not_overwrite(tmp_path):
    (tmp_path / "taken").mkdir()
    assert "exists" in liger("new-op", "taken", "--into", tmp_path, code=2)


def test_missing_package_names_the_remedy():
    with pytest.raises(SystemExit, match=r"pip install liger-kernel\[cli\]"):
        require("no_such_package", purpose="the liger command")


def test_env_report_and_imports(capsys):
    """The report names what bug reports need; importing the library does not import the command's packages."""
    from liger_kernel.env_report import print_env_report

    print_env_report()
    text = capsys.readouterr().out
    for name in ("Operating system", "Python", "liger-kernel", "torch", "CUDA", "triton", "transformers"):
        assert name in text
    packages = {"typer", "rich", "matplotlib", "tokenizers", "torch"}
    code = f"import sys, liger_kernel.cli, liger_kernel.env_report; print({packages} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
