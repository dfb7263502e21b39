"""`liger convergence`: one model trained with and without the kernels, from the same weights on the same data, to any length.

A call trains as long as it is allowed and leaves a checkpoint; the same call again goes on from there. Every step is a line of
`<arm>.jsonl` in the run's folder, and every call ends with a report of what is there.
"""

import json
import pathlib
import shutil
import time

from liger_kernel.cli import record
from liger_kernel.cli.convergence.train import whole_lines

BASELINE, PATCHED, SPREAD = "baseline", "liger", "spread"
NEEDS = ("settings", "arms", "limit")


def arms_of(config, spread, control, hook):
    """The arms' configurations: the baseline, the kernels (or, with `control`, the baseline once more), and another seed's baseline."""
    arms = [(BASELINE, False, 0), (PATCHED, not control, 0)] + ([(SPREAD, False, 1)] if spread else [])
    return [config | {"arm": name, "patched": patched, "seed": config["seed"] + shift, "hook": hook} for name, patched, shift in arms]


def devices_of(device, arms):
    """Every CUDA device, as many as there are arms, for "auto" and "cuda"; else the one that was named."""
    import torch

    from liger_kernel.cli.app import pick_device

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device in ("auto", "cuda") and count > 1:
        return [f"cuda:{i}" for i in range(min(count, arms))]
    return [pick_device(device)]


def read_log(path):
    """A log's columns: {name: list}."""
    rows = [json.loads(line) for line in whole_lines(path)]
    return {key: [row[key] for row in rows] for key in (rows[0] if rows else ())}


def last_step(out, name):
    """The last step of an arm's log; 0 without one."""
    return (read_log(out / f"{name}.jsonl").get("step") or [0])[-1]


def earlier(out, begun):
    """What a report in `out` says of the run that this call, which began the arms `begun`, cannot know; nothing without one."""
    keys = () if PATCHED in begun else ("patched",) if begun else ("patched", "parameters", "date", "device", "environment", "commit")
    try:
        there = json.loads((out / "report.json").read_text())
    except (OSError, ValueError):  # none, or one that was being written when its writer was killed
        return {}
    return {key: there[key] for key in keys if key in there}


def prepare(config, folder, data, tokenizer, synthetic, console):
    """What --data and --synthetic say, as the workers' {kind, ...}."""
    from liger_kernel.cli.convergence.data import STANDARD
    from liger_kernel.cli.convergence.data import prepare as prepare_tokens

    if synthetic:
        return {"kind": "synthetic"}
    sources = [STANDARD] if not data else [str(path) for path in data]
    with console.status("reading the text") as status:
        made = prepare_tokens(folder / "data", sources, tokenizer, config["model"]["vocab_size"],
                              config["steps"] * config["batch"] * config["seq"], status.update)
    rounds = config["steps"] * config["batch"] * config["seq"] / made["tokens"]
    console.print(f"text: {made['tokens']:,} tokens ({rounds:.1f} times round), {made['used']:,} of {config['model']['vocab_size']:,} "
                  f"entries of the vocabulary used", highlight=False)
    return made | {"path": str(pathlib.Path(made["path"]).resolve())}


def run(model, device, out, *, tokens=None, data=(), tokenizer="bpe", synthetic=False, spread=False, control=False, minutes=None,
        fresh=False, keep=False, limit=0.01, json_path=None, hook=None, part_mb=1024, **options):
    """Trains, writes the report into `out`, prints it.

    Returns:
        0; 1 when the smoothed loss curves differ by more than `limit`; 2 when `out` holds a run of other settings, or something
        that was asked for is not there.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from liger_kernel.cli.convergence import checkpoint
    from liger_kernel.cli.convergence.arms import train
    from liger_kernel.cli.convergence.data import source_of
    from liger_kernel.cli.convergence.settings import differences, settings

    begun, console = time.monotonic(), record.console()
    devices = devices_of(device, 3 if spread else 2)
    try:
        config = settings(model, devices[0], tokens, **options)
        config |= {"data_seed": config["seed"], "control": control, "part_bytes": part_mb << 20, "folder": str(out.resolve())}
        config["data"] = prepare(config, out, data, tokenizer, synthetic, console)
        source_of(config)  # text for less than one sequence ends here, not in the arms
    except ValueError as e:
        console.print(f"[red]{e}[/]", highlight=False)
        return 2
    paths = [out / name for name in (BASELINE, PATCHED, SPREAD)]
    if fresh:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
            path.with_suffix(".jsonl").unlink(missing_ok=True)
        (out / "report.json").unlink(missing_ok=True)
    if not any(last_step(out, path.name) or checkpoint.step_of(path) for path in paths):  # a run that failed before its first step is none
        (out / "settings.json").unlink(missing_ok=True)
    other = differences(out, config | {"data": {k: v for k, v in config["data"].items() if k != "path"} | {"tokenizer": tokenizer}})
    if other:
        console.print(f"[red]{out} holds a run of other settings ({'; '.join(other)}); give another --out, or --fresh to begin again[/]",
                      highlight=False)
        return 2
    configs, arms = arms_of(config, spread, control, hook), []
    waiting = [c for c in configs if last_step(out, c["arm"]) < config["steps"]]
    if waiting:
        note = TextColumn("{task.fields[note]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), note, TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            arms = train(waiting, devices, minutes, begun, progress, lambda n: checkpoint.bytes_of(n, config["checkpoint"]))
    complete = all(last_step(out, c["arm"]) >= config["steps"] for c in configs)
    if complete and not keep:
        for c in configs:
            shutil.rmtree(out / c["arm"], ignore_errors=True)
    reports = {arm.name: arm.report for arm in arms if arm.report}
    parameters = next((arm.parameters for arm in arms), None)
    logs = {c["arm"]: read_log(out / f"{c['arm']}.jsonl") for c in configs}
    document = record.document(",".join(devices), settings={k: v for k, v in config.items() if k not in ("folder", "data")}, limit=limit,
                               data=config["data"]["kind"], parameters=parameters, patched=reports, complete=complete, arms=logs)
    return finish(document | earlier(out, [arm.name for arm in arms]), out, json_path, console)


def finish(document, out, json_path, console):
    """Tables, files, verdict and exit code of a document, measured now or read."""
    from liger_kernel.cli.convergence import report

    found = document["found"] = report.compare(document)
    report.show(document, found, console)
    if out is not None and found["steps"]:
        for path in report.write(out, document, found):
            console.print(f"report: {path}", highlight=False)
    if json_path is not None:
        record.write(json_path, document, console)
    console.print(f"[bold {'green' if found['passes'] else 'red'}]{found['sentence']}[/]", highlight=False, soft_wrap=True)
    return 0 if found["passes"] else 1


def show_file(path, out):
    """The same from a file that --json wrote, or a run's report.json; drawn into `out` unless it is None."""
    return finish(record.read(path, NEEDS, "liger convergence"), out, None, record.console())
