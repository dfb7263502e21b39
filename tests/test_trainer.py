"""transformers' Trainer with use_liger_kernel=True."""

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.models.llama import modeling_llama

import liger_kernel.transformers as liger
from liger_kernel.patch import tiny, unpatch


class Data(torch.utils.data.Dataset):
    def __init__(self, count=16):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, 1000, (count, 24), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        return {"input_ids": ids, "labels": ids.where(torch.arange(24) >= i % 7, -100), "unused_column": 3}


def trainer(tmp_path, model=None, **arguments):
    options = dict(output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=6, learning_rate=1e-3, use_cpu=True, logging_steps=1,
                   save_strategy="no", report_to=[], seed=0, disable_tqdm=True)
    model = model or tiny.causal_lm("llama")
    return Trainer(model=model, args=TrainingArguments(**{**options, **arguments}), train_dataset=Data(), eval_dataset=Data(6))


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.fixture
def reference(tmp_path):
    run = trainer(tmp_path)
    run.train()
    return losses(run), run.model.state_dict(), run.evaluate()["eval_loss"]


@pytest.mark.parametrize("config", [
    None,
    {"rms_norm": False, "cross_entropy": True, "fused_linear_cross_entropy": False},
    {"fused_linear_cross_entropy": False},
    {"unknown_flag": True},
], ids=str)
def test_use_liger_kernel(config, tmp_path, reference):
    """The run is the unpatched one, step by step, and ends at the same weights."""
    run = trainer(tmp_path, use_liger_kernel=True, liger_kernel_config=config)
    run.train()
    expected, weights, eval_loss = reference
    torch.testing.assert_close(losses(run), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(run.evaluate()["eval_loss"], eval_loss, rtol=1e-4, atol=0)
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=2e-4)
    assert modeling_llama.apply_rotary_pos_emb == liger.liger_rotary_pos_emb
    assert ("LigerRMSNorm" in repr(run.model.model.norm)) == (not config or config.get("rms_norm", True))
    unpatch(run.model)


@pytest.mark.parametrize("steps", [2, 4])
def test_gradient_accumulation(steps, tmp_path):
    """num_items_in_batch spans the accumulation steps: as one large batch."""
    results = []
    for batch, accumulation in ((8, 1), (8 // steps, steps)):
        run = trainer(tmp_path, use_liger_kernel=True, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
                      max_steps=2)
        run.train()
        results.append(losses(run))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=0)


def test_evaluation_with_metrics_and_label_smoothing(tmp_path):
    """C101: logits reach compute_metrics; the trainer's own label smoothing works."""
    shapes = []

    def metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {"n": 1}

    run = trainer(tmp_path, use_liger_kernel=True, label_smoothing_factor=0.1)
    run.compute_metrics = metrics
    run.train()
    assert run.evaluate()["eval_n"] == 1 and shapes == [(6, 24, 1000)]
    plain = trainer(tmp_path, label_smoothing_factor=0.1)
    plain.train()
    torch.testing.assert_close(losses(run), losses(plain), rtol=1e-4, atol=0)


@pytest.mark.parametrize("custom", [False, True], ids=["smoother", "compute_loss_func"])
def test_loss_only_evaluation_of_a_loss_from_logits(custom, tmp_path):
    """C101: Trainer asks for no logits and takes the labels away, then wants logits."""
    results = []
    for use in (False, True):
        run = trainer(tmp_path, use_liger_kernel=use, label_smoothing_factor=0.0 if custom else 0.1, max_steps=2)
        if custom:
            run.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.float().square().mean()
        run.train()
        results.append(run.evaluate()["eval_loss"])
        unpatch(run.model)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=0)


def test_two_trainings_and_evaluation_first(tmp_path):
    """The patch is applied at each train(); evaluation before it runs the model as it is."""
    run = trainer(tmp_path, use_liger_kernel=True, max_steps=2, bf16=True)
    before = run.evaluate()["eval_loss"]
    run.train()
    run.train()
    assert run.evaluate()["eval_loss"] < before
    saved = tmp_path / "saved"
    run.save_model(saved)
    again = modeling_llama.LlamaForCausalLM.from_pretrained(saved)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_peft_model(tmp_path):
    """Trainer patches the base model inside the PEFT wrapper."""
    peft = pytest.importorskip("peft")
    results = []
    for use in (False, True):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        run = trainer(tmp_path, peft.get_peft_model(tiny.causal_lm("llama"), config), use_liger_kernel=use)
        run.train()
        results.append(losses(run))
        assert ("LigerRMSNorm" in repr(run.model)) == use
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=0)
