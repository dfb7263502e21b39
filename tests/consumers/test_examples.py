"""Every example runs, and learns. An example whose package is not here runs in an environment of test_environments.py."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def run(*command, cwd=None, **variables):
    done = subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: see test_environments.py")


def losses(output):
    first, last = re.search(r"loss: ([\d.]+) -> ([\d.]+)", output).groups()
    return float(first), float(last)


@pytest.mark.parametrize("script, package", [("trainer/train.py", "accelerate"), ("trl/sft.py", "trl")])
def test_training(script, package):
    needs(package)
    ours, plain = run(sys.executable, EXAMPLES / script), run(sys.executable, EXAMPLES / script, "--plain")
    assert "LigerRMSNorm" in ours and "LigerRMSNorm" not in plain
    first, last = losses(ours)
    assert last < 0.3 * first
    assert losses(plain) == pytest.approx(losses(ours), rel=1e-3)


def test_hub(tmp_path):
    needs("kernels")
    if os.environ.get("LIGER_TEST_LIFT_KERNELS"):
        pytest.skip("transformers here takes no kernels package that there is")
    run(sys.executable, "-m", "liger_kernel.hub", tmp_path / "repository", "--no-bundle")
    for arguments in ([], [tmp_path / "repository"]):
        output = run(sys.executable, EXAMPLES / "hub" / "use_kernels.py", *arguments)
        assert "LigerRMSNorm.forward" in output and "LigerSwiGLUMLP.forward" in output
        before, after, compiled = map(float, re.findall(r"\d+\.\d{6}", output))
        assert after == pytest.approx(before, rel=1e-5) and compiled == pytest.approx(before, rel=1e-4)


def test_axolotl(tmp_path):
    needs("axolotl")
    run(sys.executable, EXAMPLES / "tiny_data.py", tmp_path / "tiny")
    output = run(sys.executable, "-m", "axolotl.cli.train", EXAMPLES / "axolotl" / "tiny.yaml", cwd=tmp_path, CUDA_VISIBLE_DEVICES="",
                 AXOLOTL_DO_NOT_TRACK="1", WANDB_DISABLED="true", HF_HUB_OFFLINE="1")
    found = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)]
    assert len(found) >= 5 and found[-1] < 0.3 * found[0], output[-3000:]
