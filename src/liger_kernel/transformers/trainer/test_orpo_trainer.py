"""The module without trl; with trl, training with LigerORPOTrainer is training with trl's own trainer, step by step."""

import contextlib
import importlib.util
import inspect
import sys
import warnings

import pytest
import torch

from liger_kernel.transformers.trainer import orpo_trainer


def test_importable_without_trl(monkeypatch):
    """Other packages import the redirection from here; the trainer says what it needs."""
    assert inspect.isclass(orpo_trainer._FSDPForwardRedirection)
    for module in ("trl", "trl.trainer", "trl.experimental", "trl.experimental.orpo"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(orpo_trainer.__dict__, "LigerORPOTrainer", raising=False)
    import liger_kernel.transformers.trainer as package

    for home in (orpo_trainer, package):
        with pytest.raises(ImportError, match="needs a trl"):
            _ = home.LigerORPOTrainer
        with pytest.raises(AttributeError):
            _ = home.nothing


def test_inside_a_wrapper():
    """The method runs within the wrapper's forward, once; the inner module's own forward is back afterwards, also after an error."""
    calls = []

    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *arguments):
            calls.append("wrapper")
            return self.inner(*arguments)

    inner = torch.nn.Linear(2, 2)
    x = torch.randn(3, 2)
    for own in (None, lambda x: x * 5):
        if own is not None:
            inner.forward = own
        before = inner.forward
        got = orpo_trainer._inside(Wrapper(inner), inner, lambda x: inner(x) + 1, x)
        torch.testing.assert_close(got, before(x) + 1)
        with contextlib.suppress(ZeroDivisionError):
            orpo_trainer._inside(Wrapper(inner), inner, lambda x: 1 / 0, x)
        assert inner.forward == before
    assert calls == ["wrapper"] * 4
    assert orpo_trainer._inside(inner, inner, lambda x: x + 1, 1) == 2


needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")


def run(trainer, tmp_path, model="llama", peft_config=None, **options):
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig

    from liger_kernel.patch import tiny

    sys.path.insert(0, str(__import__("pathlib").Path(__file__).parents[4] / "tests" / "consumers"))
    from tools import sentences, tokenizer

    lines = sentences(24)
    data = Dataset.from_dict({"prompt": lines[:8], "chosen": [" " + t for t in lines[8:16]], "rejected": [" " + t for t in lines[16:]]})
    arguments = dict(output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=3, learning_rate=1e-3, use_cpu=True,
                     logging_steps=1, save_strategy="no", report_to=[], seed=0, disable_tqdm=True, max_length=32, bf16=False,
                     gradient_checkpointing=False, remove_unused_columns=False, beta=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        built = tiny.causal_lm(model)
        built.config.output_router_logits = model == "mixtral"
        made = trainer(model=built, args=ORPOConfig(**{**arguments, **options}), train_dataset=data, eval_dataset=data,
                       processing_class=tokenizer(), peft_config=peft_config)
        made.train()
        return made.state.log_history, made.evaluate(), made


@needs_trl
@pytest.mark.parametrize("case", ["plain", "lora on the head", "bf16", "mixture of experts", "soft cap"])
def test_training(case, tmp_path):
    """C45, C46: losses, all metrics and evaluation on one process."""
    from trl.experimental.orpo import ORPOTrainer

    options = {"bf16": {"bf16": True}, "mixture of experts": {"model": "mixtral"}, "soft cap": {"model": "gemma2"}}.get(case, {})
    if case == "lora on the head":
        import peft

        options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
    history, evaluation, made = run(orpo_trainer.LigerORPOTrainer, tmp_path, **options)
    assert made._liger_fusable == (case != "soft cap")
    options["peft_config"] = options.get("peft_config")
    want_history, want_evaluation, _ = run(ORPOTrainer, tmp_path, **options)
    tolerance = dict(rtol=3e-2, atol=3e-2) if case == "bf16" else dict(rtol=1e-3, atol=1e-4)
    compared = 0
    for got, want in zip([*history, evaluation], [*want_history, want_evaluation], strict=True):
        assert got.keys() == want.keys()
        for name in want:
            if not any(word in name for word in ("runtime", "second", "flos", "accuracies")):
                assert got[name] == pytest.approx(want[name], rel=tolerance["rtol"], abs=tolerance["atol"]), name
                compared += 1
    assert compared > 40
