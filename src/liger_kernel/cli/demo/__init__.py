"""`liger demo`: one small Llama, trained twice on the same data from the same weights; see train.py, parts.py and report.py."""

import json
import os
import sys
import tempfile

from liger_kernel.cli.child import Child

RUNS = (("transformers", False), ("liger", True))
CPU = {"batch": 4, "seq": 256, "hidden": 256, "layers": 4}
CUDA = {"batch": 8, "seq": 2048, "hidden": 2048, "layers": 8}


def settings(device, **options):
    """The run's numbers: what the options leave open follows from the device."""
    defaults = CUDA if device != "cpu" else CPU
    config = defaults | {k: v for k, v in options.items() if v is not None}
    head_dim = 128 if config["hidden"] >= 1024 else 64 if config["hidden"] >= 128 else 32
    if config["hidden"] % head_dim:
        raise SystemExit(f"--hidden is {config['hidden']}, which is not a multiple of the head size {head_dim}")
    return config | {"device": device, "head_dim": head_dim, "seed": 0, "lr": 3e-4 if device != "cpu" else 1e-3,
                     "warmup": max(2, config["steps"] // 5)}


def train(config, name, patched, progress):
    """Runs one worker under a progress bar; its result, or SystemExit with the end of what it wrote."""
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "liger_kernel.cli.demo.train", json.dumps(config | {"patched": patched})]
    task = progress.add_task(f"{name:12s}", total=config["steps"], note="starting")
    result, child = None, Child(command, env)
    for event in child.events():
        if event.pop("event") == "result":
            result = event
        else:
            note = f"loss {event['loss']:.3f}, {config['batch'] * config['seq'] / event['seconds']:.0f} tokens/s"
            progress.update(task, completed=event["step"], note=note if event["step"] < config["steps"] else f"{note}; profiling")
    if child.failure() or result is None:
        raise SystemExit(f"the run of {name} failed, {child.failure() or 'without a result'}")
    progress.update(task, note=f"median {result['tokens_per_s']:.0f} tokens/s")
    return result


def run(device, out, **options):
    """Trains, writes the report into `out` and prints it. 0, or 1 when the loss curves disagree."""
    from liger_kernel.cli import require

    require("matplotlib", "tokenizers", "transformers", purpose="liger demo")
    import torch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from liger_kernel.cli import record
    from liger_kernel.cli.demo import data, report

    console = record.console()
    config = settings(device, **options)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        with console.status("Training a tokenizer on the standard library's sources"):
            tokens, used = data.tokenize(config["vocab"], config["batch"] * config["seq"] * config["steps"])
            config["tokens"] = os.path.join(folder, "tokens.pt")
            torch.save(tokens, config["tokens"])
        console.print(f"{len(tokens):,} tokens, {used:,} of {config['vocab']:,} entries of the vocabulary used", highlight=False)
        note = TextColumn("{task.fields[note]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), note, TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            results = {name: train(config, name, patched, progress) for name, patched in RUNS}
    del config["tokens"]
    found = report.compare(config, results)
    report.write(out, config, results, found)
    report.show(console, config, results, found)
    console.print(f"report: {out / 'report.html'}", highlight=False)
    console.print(f"[bold]{found['sentence']}[/]", highlight=False)
    return 0 if found["curves_agree"] else 1
