"""TRL's DPO and KTO trainers with use_liger_kernel=True, which take these losses, against themselves without; TRL's CPO, SimPO and ORPO
formulas. Where trl is at least 1.9 and below 1.13."""

import importlib.util
import pathlib
import sys
import types
import warnings

import pytest
import torch

if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl", allow_module_level=True)

import trl
from packaging.version import Version

if not Version("1.9") <= Version(trl.__version__) < Version("1.13"):
    pytest.skip(f"trl {trl.__version__} does not use these losses", allow_module_level=True)

from datasets import Dataset

from liger_kernel.chunked_loss.preference_cases import IGNORED, PAIRED, make, ours
from liger_kernel.patch import tiny, unpatch

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "tests" / "consumers"))
from tools import sentences, tokenizer


def train(trainer, config, tmp_path, data, use_liger_kernel, **options):
    arguments = dict(output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3, use_cpu=True,
                     logging_steps=1, save_strategy="no", report_to=[], seed=0, disable_tqdm=True, max_length=32, bf16=False,
                     gradient_checkpointing=False, use_liger_kernel=use_liger_kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        reference = tiny.causal_lm("llama")
        with torch.no_grad():
            for p in reference.parameters():
                p.add_(torch.randn_like(p) * 0.01)
        run = trainer(model=tiny.causal_lm("llama"), ref_model=reference, args=config(**{**arguments, **options}), train_dataset=data,
                      eval_dataset=data, processing_class=tokenizer())
        run.train()
        logs = [*run.state.log_history, run.evaluate()]
    unpatch(run.model)
    return logs


def compare(ours, theirs, skipped):
    compared = 0
    for got, want in zip(ours, theirs, strict=True):
        for name in got.keys() & want.keys():
            if not any(word in name for word in ("runtime", "second", "flos", "accuracies", "entropy", "epoch", *skipped)):
                assert got[name] == pytest.approx(want[name], rel=1e-3, abs=2e-4), name
                compared += 1
    assert compared > 20


LINES = sentences(24)


# robust and exo_pair need a label_smoothing that trl does not hand over; sppo_hard's loss is large
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop"])
def test_dpo_trainer(loss_type, tmp_path):
    """Loss, gradient norm, log-probabilities and rewards of three steps and an evaluation. trl's own logits/* are over completions."""
    data = Dataset.from_dict({"prompt": LINES[:8], "chosen": [" " + t for t in LINES[8:16]], "rejected": [" " + t for t in LINES[16:]]})
    runs = [train(trl.DPOTrainer, trl.DPOConfig, tmp_path, data, use, loss_type=[loss_type], beta=0.3) for use in (True, False)]
    compare(*runs, skipped=("logits/",))


def test_kto_trainer(tmp_path):
    data = Dataset.from_dict({"prompt": LINES[:8], "completion": [" " + t for t in LINES[8:16]], "label": [i % 3 != 0 for i in range(8)]})
    runs = [train(trl.KTOTrainer, trl.KTOConfig, tmp_path, data, use, beta=0.3) for use in (True, False)]
    compare(*runs, skipped=("logits/",))


@pytest.mark.parametrize("name", ["orpo without nll", "cpo without nll", "cpo smoothed, average", "simpo"])
def test_formulas(name):
    """Losses, rewards and odds by the methods of trl's trainers, from our log-probabilities."""
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    loss = PAIRED[name]
    batch = make(loss, torch.float32, "cpu")
    value, metrics = ours(loss, batch)
    this = types.SimpleNamespace(
        beta=loss.truth["beta"], alpha=0.0, simpo_gamma=loss.truth.get("gamma"), label_smoothing=loss.truth.get("s", 0.0),
        loss_type="simpo" if loss.name == "simpo" else "sigmoid", accelerator=types.SimpleNamespace(device="cpu"))
    if loss.name == "orpo":
        losses, *want = ORPOTrainer.odds_ratio_loss(this, *metrics[:2])
        losses = -losses
    else:
        losses, *want = CPOTrainer.cpo_loss(this, *metrics[:2])
    torch.testing.assert_close(value - loss.truth.get("alpha", 1.0) * metrics[4], losses.mean())
    for got, wanted in zip(metrics[5:], want, strict=True):
        torch.testing.assert_close(got, wanted)
    # and the log-probabilities by trl's function of the logits
    labels = torch.cat([torch.full((6, 1), IGNORED), batch.target], 1)
    logits = torch.nn.functional.linear(torch.nn.functional.pad(batch.x, (0, 0, 0, 1)), batch.weight, batch.bias)
    logps = CPOTrainer.get_batch_logps(logits, labels, average_log_prob=loss.average)
    torch.testing.assert_close(torch.cat(metrics[:2]), logps)
