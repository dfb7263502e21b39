"""Runs the tests of other projects' packages in the environments that scripts/consumer-env makes, one process each."""

import os
import pathlib
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]

# environment -> (test files of this folder, environment variables)
TRAINER, EXAMPLES = "../test_trainer.py", "test_examples.py"
PACKAGE = "../../src/liger_kernel"
TRL_LOSSES = [f"{PACKAGE}/chunked_loss/test_grpo_trl.py", f"{PACKAGE}/chunked_loss/test_preference_trl.py",
              f"{PACKAGE}/transformers/trainer/test_orpo_trainer.py"]
RUNS = {
    "hub": (["test_hub.py", EXAMPLES], {}),
    "hub-5.17": (["test_hub.py", TRAINER], {}),
    "hub-newest": (["test_hub.py"], {"LIGER_TEST_LIFT_KERNELS": "0.18.2"}),
    "trl-1.12": (["test_trl.py", "test_trl_losses.py", EXAMPLES, *TRL_LOSSES], {}),
    "trl": (["test_trl.py", EXAMPLES], {}),
    "trl-0.29": (["test_trl_losses.py"], {}),
    "axolotl": (["test_axolotl.py", EXAMPLES], {}),
    "llamafactory": (["test_llamafactory.py", TRAINER], {}),
    "ms-swift": (["test_swift.py"], {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_in_environment(name):
    files, variables = RUNS[name]
    environment = ROOT / f".venv-{name}"
    if not (environment / ".ready").exists():
        pytest.skip(f"no environment: scripts/consumer-env {name} makes it")
    command = [environment / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    done = subprocess.run(command, cwd=HERE, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    assert " passed" in done.stdout, done.stdout[-1000:]
