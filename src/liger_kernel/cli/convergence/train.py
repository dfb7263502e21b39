"""One arm of `liger convergence`, in a process of its own: trains as it is told, line by line on stdin.

Orders are JSON: {"do": "train", "until": step}, {"do": "save"}, {"do": "stop"}. After each the worker reports "ready"; see
cli/child.py. Everything but time and memory is a function of the settings and the step.
"""

import concurrent.futures
import contextlib
import json
import math
import os
import pathlib
import resource
import runpy
import sys
import time

from liger_kernel.cli.child import emit


def build(config):
    """The model in fp32 with weights drawn by name, so that all arms of one seed start from the same numbers."""
    import torch
    from transformers import AutoModelForCausalLM

    from liger_kernel.cli.step.configs import config_of

    entries = config_of(config["model"])
    model = AutoModelForCausalLM.from_config(entries, dtype=torch.float32, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(config["seed"])
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.to(config["device"]).train()
    if config["patched"]:
        from liger_kernel.patch import patch_model

        emit(event="patched", report=str(patch_model(model)))
        if config.get("hook"):  # tests break a kernel here
            runpy.run_path(config["hook"])["apply"](model)
    return model


def learning_rate(config, step):
    """Linear warm-up, then a cosine down to a tenth."""
    if step < config["warmup"]:
        return config["lr"] * (step + 1) / config["warmup"]
    done = (step - config["warmup"]) / max(1, config["steps"] - config["warmup"])
    return config["lr"] * (0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0))))


def whole_lines(path):
    """The lines of a log, without the one that was being written when its writer was killed."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


class Log:
    """A JSON line a step; those after `step`, which a stopped run had no checkpoint of, are dropped."""

    def __init__(self, path, step):
        self.path = pathlib.Path(path)
        kept = [line + "\n" for line in whole_lines(self.path) if json.loads(line)["step"] <= step]
        partial = self.path.with_suffix(".part")
        partial.write_text("".join(kept))
        os.replace(partial, self.path)
        self.file = self.path.open("a")

    def write(self, **row):
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()


class Ahead:
    """Batches made one ahead by a thread of their own."""

    def __init__(self, source):
        self.source, self.pool, self.next = source, concurrent.futures.ThreadPoolExecutor(1), (None, None)

    def __call__(self, step):
        place, pending = self.next
        batch = pending.result() if place == step else self.source(step)
        self.next = step + 1, self.pool.submit(self.source, step + 1)
        return batch


def main(config):
    import torch
    import transformers

    from liger_kernel.cli.convergence import checkpoint
    from liger_kernel.cli.convergence.data import source_of

    transformers.logging.set_verbosity_error()
    device, cuda = config["device"], config["device"] != "cpu"
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(config["seed"])
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    folder = pathlib.Path(config["folder"])
    step = checkpoint.load(folder / config["arm"], model, optimizer)
    log, batches = Log(folder / f"{config['arm']}.jsonl", step), Ahead(source_of(config))
    count, saved = config["batch"] * config["seq"], step

    def precision():
        return torch.autocast(device.partition(":")[0], torch.bfloat16) if config["precision"] == "bf16" else contextlib.nullcontext()

    def train():
        start = time.perf_counter()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        ids = torch.from_numpy(batches(step)).to(device)
        rate = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with precision():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss, norm = float(loss.detach()), float(norm)  # waits for the device
        seconds = time.perf_counter() - start
        memory = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return dict(loss=loss, grad_norm=norm, lr=rate, tokens_per_s=count / seconds, memory_bytes=memory, seconds=seconds)

    emit(event="built", parameters=sum(p.numel() for p in model.parameters()))
    emit(event="ready", step=step)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "train":
            while step < order["until"]:
                row = train()
                step += 1
                if step % config["log_every"] == 0 or step == config["steps"]:
                    log.write(step=step, tokens=step * count, **row)
                    emit(event="step", step=step, loss=row["loss"], tokens_per_s=row["tokens_per_s"])
            if cuda and config["shared"]:
                torch.cuda.empty_cache()  # another arm's turn on this device
        elif order["do"] == "save" and config["checkpoint"] != "none" and saved != step:
            checkpoint.save(folder / config["arm"], step, model, optimizer, config["checkpoint"] == "compact", config["part_bytes"])
            saved = step
        elif order["do"] == "stop":
            break
        emit(event="ready", step=step)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
