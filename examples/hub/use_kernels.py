"""transformers' `use_kernels` with this package in place of a repository of the Hub, on the CPU or on CUDA. Needs transformers and the
version of kernels that it asks for.

    python examples/hub/use_kernels.py [FOLDER]     FOLDER: a repository that `python -m liger_kernel.hub FOLDER` wrote
"""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import tiny_data

from liger_kernel import hub

repository = sys.argv[1] if len(sys.argv) > 1 else None
device = "cuda" if torch.cuda.is_available() else "cpu"
model = tiny_data.model().to(device).train()
tokenizer = tiny_data.tokenizer()
batch = tokenizer(tiny_data.SENTENCES[:16], return_tensors="pt", return_token_type_ids=False).to(device)

before = model(**batch, labels=batch["input_ids"]).loss
model.set_use_kernels(True, hub.kernel_config(repository, mlp=True))
after = model(**batch, labels=batch["input_ids"]).loss
compiled = torch.compile(model, fullgraph=True)(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
compiled.backward()

layer = model.model.layers[0]
print("norm:", layer.input_layernorm.forward.__func__.__qualname__)
print("mlp:", layer.mlp.forward.__func__.__qualname__)
print(f"loss: {before.item():.6f} before, {after.item():.6f} with the kernels, {compiled.item():.6f} compiled")
