"""TRL's SFTTrainer. Up to TRL 1.14 the kernels come with `use_liger_kernel=True`, the fused loss among them; TRL 1.15 has a fused
loss of its own, takes norms, MLPs and RoPE from here, and warns that the option will go in 2.0. Needs trl.

    python examples/trl/sft.py [--plain] [--steps 60]
"""

import argparse
import pathlib
import sys
import tempfile

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import tiny_data

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true", help="without the kernels, to compare")
parser.add_argument("--steps", type=int, default=60)
arguments = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model=tiny_data.model(),
        args=SFTConfig(
            output_dir=folder, max_steps=arguments.steps, per_device_train_batch_size=8, learning_rate=2e-3, logging_steps=10,
            save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(), bf16=torch.cuda.is_available(), max_length=64,
            disable_tqdm=True, use_liger_kernel=not arguments.plain,
        ),
        train_dataset=Dataset.from_dict({"text": tiny_data.SENTENCES}),
        processing_class=tiny_data.tokenizer(),
    )
    trainer.train()
    print("layers:", trainer.model.model.norm)
    print(f"loss: {trainer.state.log_history[0]['loss']} -> {trainer.state.log_history[-2]['loss']}")
