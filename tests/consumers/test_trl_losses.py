"""TRL's trainers with use_liger_kernel=True give what they give without: losses, gradients, their norms and metrics. Runs in the trl
environments; trl_cases.py has the cases and the bounds, and says where TRL's two paths differ by design."""

import importlib.util
import warnings

import pytest

if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl: see test_environments.py", allow_module_level=True)

import sys

import trl
from packaging.version import Version

if not Version("0.29") <= Version(trl.__version__) < Version("1.13"):
    pytest.skip(f"trl {trl.__version__} is not among the versions of these cases", allow_module_level=True)

sys.path.insert(0, __file__.rsplit("/", 1)[0])
import trl_cases
from tools import tokenizer

from liger_kernel.patch import tiny

CASES = trl_cases.cases()
FIRST = [next(case for case in CASES if case.trainer == name) for name in dict.fromkeys(case.trainer for case in CASES)]
# Accumulation is the trainer's doing, not the loss's: without it, one case of a trainer. scripts/trl-equality runs all of them.
RUNS = [(case, accumulation) for case in CASES for accumulation in case.accumulations
        if accumulation == max(case.accumulations) or case in FIRST]


@pytest.mark.parametrize("case, accumulation", RUNS, ids=[f"{case}, accumulation {n}" for case, n in RUNS])
def test_equal(case, accumulation):
    ours, theirs = (trl_cases.run(case, use, accumulation) for use in (True, False))
    found = trl_cases.compare(ours, theirs)
    assert not trl_cases.outside(case, found), found
    if "loss" in case.unequal:  # else the reason given has gone
        assert found.gradient > 1e-3


def test_without_label_smoothing(tmp_path):
    """exo_pair needs one, which TRL has and does not hand over: an error that says so, and no NaN."""
    with warnings.catch_warnings(), pytest.raises(ValueError, match="label_smoothing"):
        warnings.simplefilter("ignore")
        model = tiny.causal_lm("llama", vocab_size=len(tokenizer()))
        arguments = trl.DPOConfig(output_dir=str(tmp_path), loss_type=["exo_pair"], label_smoothing=1e-3, use_liger_kernel=True,
                                  use_cpu=True, report_to=[])
        trl.DPOTrainer(model=model, args=arguments, train_dataset=trl_cases.data("DPO"), processing_class=tokenizer())
