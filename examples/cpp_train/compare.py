"""Trains the same Llama twice, here with PyTorch and with the C++ program, from the same weights on the same windows of a text, and
compares the loss of every step. Needs torch and transformers, not liger_kernel.

    python examples/cpp_train/compare.py build/cpp_train/train --text FILE [--device cuda] [--steps 50] ...
"""

import argparse
import pathlib
import struct
import subprocess
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MAGIC, VERSION = 0x4D414C4C, 1


def make_model(hidden=256, intermediate=688, layers=4, heads=8, kv_heads=4, seed=0):
    """A random byte-level Llama in fp32 with eager attention; norm weights are not all one, so that their gradients matter."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, rms_norm_eps=1e-6, tie_word_embeddings=False, attn_implementation="eager")).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.8, 1.2)
    return model


def parts(model):
    """The parameters in the order of the weights file."""
    yield model.model.embed_tokens.weight
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield layer.input_layernorm.weight
        yield from (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, attention.o_proj.weight)
        yield layer.post_attention_layernorm.weight
        yield from (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    yield model.model.norm.weight
    yield model.lm_head.weight


def flat(model):
    """All weights as one fp32 vector on the CPU."""
    return torch.cat([p.detach().float().flatten().cpu() for p in parts(model)])


def write_weights(model, path):
    """Eight int32 (magic, version, six sizes), then the weights as float32; little-endian."""
    c = model.config
    header = struct.pack("<8i", MAGIC, VERSION, c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers,
                         c.num_attention_heads, c.num_key_value_heads)
    pathlib.Path(path).write_bytes(header + flat(model).numpy().astype("<f4").tobytes())


def read_weights(path):
    """The weights of a file as one fp32 vector."""
    return torch.frombuffer(bytearray(pathlib.Path(path).read_bytes()[32:]), dtype=torch.float32)


def batches(text, steps, batch, seq):
    """Consecutive windows of the bytes `text`, over and over. -> (inputs, targets) [batch, seq] for each step"""
    tokens = torch.tensor(list(text))
    windows = (len(tokens) - 1) // seq
    for step in range(steps):
        starts = [(step * batch + i) % windows * seq for i in range(batch)]
        yield torch.stack([tokens[s:s + seq] for s in starts]), torch.stack([tokens[s + 1:s + seq + 1] for s in starts])


def train_torch(model, text, steps, batch, seq, lr, eps=1e-8, device="cpu"):
    """-> the loss of every step; the model is trained in place."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=eps, weight_decay=0.01)
    losses = []
    for inputs, targets in batches(text, steps, batch, seq):
        logits = model(input_ids=inputs.to(device), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_cpp(program, folder, text, weights, steps, batch, seq, lr, eps=1e-8, device="cpu", threads=0):
    """Runs the program. -> the loss of every step, the trained weights"""
    log, saved = pathlib.Path(folder) / "cpp.log", pathlib.Path(folder) / "trained.bin"
    options = {"text": text, "weights": weights, "save": saved, "log": log, "device": device, "steps": steps, "batch": batch, "seq": seq,
               "lr": lr, "eps": eps, "threads": threads}
    subprocess.run([str(program), *(word for name, value in options.items() for word in (f"--{name}", str(value)))], check=True)
    return [float(line.split()[1]) for line in log.read_text().splitlines()], read_weights(saved)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path, help="the C++ program, build/cpp_train/train")
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lr", type=float, default=1e-3)
    sizes = {"hidden": 256, "intermediate": 688, "layers": 4, "heads": 8, "kv_heads": 4, "seed": 0}
    run = {"steps": 50, "batch": 8, "seq": 128}
    for name, value in {**sizes, **run}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--bound", type=float, default=1e-4, help="largest relative difference of a loss")
    a = parser.parse_args()

    model = make_model(**{name: getattr(a, name) for name in sizes})
    run = {name: getattr(a, name) for name in run} | {"lr": a.lr, "device": a.device}
    with tempfile.TemporaryDirectory() as folder:
        weights = pathlib.Path(folder) / "weights.bin"
        write_weights(model, weights)
        start = time.perf_counter()
        cpp, trained = train_cpp(a.program.resolve(), folder, a.text, weights, **run)
        middle = time.perf_counter()
    torch_losses = train_torch(model, a.text.read_bytes(), **run)
    print(f"seconds in all: C++ {middle - start:.1f}, PyTorch {time.perf_counter() - middle:.1f}")

    print("step  PyTorch      C++          relative difference")
    differences = [abs(c - t) / t for c, t in zip(cpp, torch_losses, strict=True)]
    for step, (t, c, difference) in enumerate(zip(torch_losses, cpp, differences, strict=True)):
        if step % 5 == 0 or step + 1 == a.steps:
            print(f"{step:4}  {t:.8f}   {c:.8f}   {difference:.1e}")
    expected = flat(model)
    print(f"weights after the last step: largest difference {(trained - expected).abs().max():.1e}, "
          f"norm of the difference {(trained - expected).norm() / expected.norm():.1e} of the weights' norm")
    worst = max(differences)
    verdict = "agree" if worst <= a.bound else "DISAGREE"
    print(f"The losses of {a.steps} steps {verdict}: the largest relative difference is {worst:.1e} (bound {a.bound:.0e}), "
          f"and C++'s loss went from {cpp[0]:.3f} to {cpp[-1]:.3f}.")
    return int(worst > a.bound)


if __name__ == "__main__":
    raise SystemExit(main())
