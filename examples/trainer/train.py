"""transformers' Trainer with `use_liger_kernel=True`: one argument, no other change. Needs transformers and accelerate.

    python examples/trainer/train.py [--plain] [--steps 60]
"""

import argparse
import pathlib
import sys
import tempfile

import torch
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import tiny_data

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true", help="without the kernels, to compare")
parser.add_argument("--steps", type=int, default=60)
arguments = parser.parse_args()

tokenizer = tiny_data.tokenizer()
dataset = [tokenizer(sentence + " </s>", return_token_type_ids=False) for sentence in tiny_data.SENTENCES]

with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=tiny_data.model(),
        args=TrainingArguments(
            output_dir=folder, max_steps=arguments.steps, per_device_train_batch_size=8, learning_rate=2e-3, logging_steps=10,
            save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
            use_liger_kernel=not arguments.plain,
            # Kernels can be chosen one by one; these are the defaults for Llama.
            liger_kernel_config=None if arguments.plain else {"rope": True, "rms_norm": True, "swiglu": True,
                                                              "fused_linear_cross_entropy": True},
        ),
        train_dataset=dataset,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    print("layers:", type(trainer.model.model.norm).__name__, "runs", trainer.model.model.norm)
    print(f"loss: {trainer.state.log_history[0]['loss']} -> {trainer.state.log_history[-2]['loss']}")
