"""TRL's SFTTrainer with use_liger_kernel=True: the run is that of the model as it is. Runs in the trl environments."""

import importlib.util
import warnings

import pytest
import torch

if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl: see test_environments.py", allow_module_level=True)

import sys

import trl
from packaging.version import Version
from transformers.models.llama import modeling_llama

import liger_kernel.transformers as liger
from liger_kernel.patch import tiny, unpatch

sys.path.insert(0, __file__.rsplit("/", 1)[0])
from tools import texts, tokenizer

# From 1.15 the SFT trainer has a fused head of its own, and turns ours off.
OWN_HEAD = Version(trl.__version__) >= Version("1.15")


def sft(tmp_path, use_liger_kernel, model="llama", peft_config=None, **options):
    arguments = dict(output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=5, learning_rate=1e-3, use_cpu=True,
                     logging_steps=1, save_strategy="no", report_to=[], seed=0, disable_tqdm=True, max_length=32, bf16=False,
                     gradient_checkpointing=False, use_liger_kernel=use_liger_kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        config = trl.SFTConfig(**{**arguments, **options})
        run = trl.SFTTrainer(model=tiny.causal_lm(model), args=config, train_dataset=texts(), eval_dataset=texts(6),
                             processing_class=tokenizer(), peft_config=peft_config)
    run.train()
    return run


def logged(run, name):
    return [entry[name] for entry in run.state.log_history if name in entry]


CASES = {
    "plain": {},
    "qwen3": {"model": "qwen3"},
    "packing": {"packing": True, "packing_strategy": "wrapped"},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "dft": {"loss_type": "dft"},
    "no fused head": {"liger_kernel_config": {"fused_linear_cross_entropy": False}},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("case", CASES)
def test_sft(case, tmp_path):
    """Losses, token accuracy and weights, step by step."""
    options = CASES[case]
    plain = sft(tmp_path, False, **{k: v for k, v in options.items() if k != "liger_kernel_config"})
    ours = sft(tmp_path, True, **options)
    tolerance = dict(rtol=2e-2, atol=0) if case == "bf16" else dict(rtol=1e-4, atol=0)
    # up to 1.14 the accuracy is the fused head's
    for name in ("loss", "mean_token_accuracy") if OWN_HEAD or case != "no fused head" else ("loss",):
        assert len(logged(ours, name)) >= 5
        torch.testing.assert_close(logged(ours, name), logged(plain, name), **(tolerance if name == "loss" else dict(rtol=0, atol=3e-2)))
    assert "LigerRMSNorm" in repr(ours.model)
    if case != "qwen3":
        assert modeling_llama.apply_rotary_pos_emb == liger.liger_rotary_pos_emb
    torch.testing.assert_close(ours.evaluate()["eval_loss"], plain.evaluate()["eval_loss"], **tolerance)
    unpatch(ours.model)


def test_sft_with_lora(tmp_path):
    peft = pytest.importorskip("peft")
    config = lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights=True)
    results = []
    for use in (False, True):
        torch.manual_seed(0)
        run = sft(tmp_path, use, peft_config=config())
        results.append(logged(run, "loss"))
        assert ("LigerRMSNorm" in repr(run.model)) == use
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=0)


def test_who_makes_the_loss(tmp_path):
    """Up to 1.14 the fused head is ours; later versions refuse it."""
    if OWN_HEAD:
        with pytest.raises(ValueError, match="fused_linear_cross_entropy"):
            sft(tmp_path, True, liger_kernel_config={"fused_linear_cross_entropy": True})
    else:
        run = sft(tmp_path, True)
        assert run.model.forward.__func__.__module__.startswith("liger_kernel.")
        unpatch(run.model)
