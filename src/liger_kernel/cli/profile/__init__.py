"""`liger profile`: where one training step of a causal language model goes, as transformers ships it (`hf`) and patched.

Each arm is a process of its own: a model with the same weights on the same tokens, or the user's script (script.py). Time is the median
of a few steps; a further step gives peak memory by phase (phases.py), further ones the time by part (step/kinds.py) and the device's
timeline (timeline.py).
"""

import contextlib
import json
import os
import pathlib
import sys
import time

from liger_kernel.cli import record
from liger_kernel.cli.child import Child

ARMS = ("hf", "patched")
CPU = {"batch": 4, "seq": 512, "dtype": "float32", "steps": 5, "warmup": 2}
CUDA = {"batch": 4, "seq": 4096, "dtype": "bfloat16", "steps": 4, "warmup": 2}


def settings(model, device, defaults, layers, weights, **options):
    """A worker's settings from a command's options; ValueError for a model that is none or a folder without weights."""
    from liger_kernel.cli.step import configs

    entries = configs.numbers(model, layers)
    if weights:
        own = configs.numbers(model).get("num_hidden_layers")
        if layers is not None and own is not None and layers > own:
            raise ValueError(f"--weights: {model} has {own} layers, --layers is {layers}; leave one of the two out")
        if not any(True for pattern in ("*.safetensors", "pytorch_model*.bin") for _ in pathlib.Path(model).glob(pattern)):
            raise ValueError(f"--weights: {model} is no folder with weights (*.safetensors, pytorch_model*.bin)")
        weights = str(pathlib.Path(model).resolve())
    chosen = defaults | {k: v for k, v in options.items() if v is not None}
    return chosen | {"device": device, "model": entries, "seed": 0, "weights": weights or None, "attention": "sdpa"}


def is_script(model):
    return model.endswith(".py")


def settings_of_script(script, arguments, device, defaults, steps):
    """The same of a user's script, but for what only its run tells."""
    if not pathlib.Path(script).is_file():
        raise ValueError(f"{script} is no file")
    return {"script": str(pathlib.Path(script).resolve()), "arguments": list(arguments), "device": device, "seed": 0,
            "steps": steps or defaults["steps"], "warmup": defaults["warmup"], "dtype": "bfloat16"}


def bars(console):
    """Progress bars that vanish when their work is done."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(TextColumn("{task.description:8s}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"),
                    console=console, transient=True)


def collect(module, config, seconds, take):
    """Runs a worker and hands its events to `take`; {status, error}: ok, out of memory, out of time or failed."""
    if seconds <= 0:
        return {"status": "out of time", "error": "not started"}
    short = None
    child = Child([sys.executable, "-m", module, json.dumps(config)], dict(os.environ))
    for event in child.events(seconds):
        if event["event"] == "out of memory":
            short = {"status": "out of memory", "error": event["error"]}
        else:
            take(event)
    if child.stopped:
        return {"status": "out of time", "error": f"stopped after {seconds:.0f} s"}
    if child.process.returncode == -9:
        return {"status": "out of memory", "error": "killed by the system"}
    if child.failure():
        return {"status": "failed", "error": child.failure()}
    return short or {"status": "ok"}


def run_arm(config, seconds, progress):
    """What one worker measured, with `status`."""
    total = config["warmup"] + config["steps"] + 3
    task, result = progress.add_task(config["arm"], total=total, note="starting"), {}

    def take(event):
        kind = event.pop("event")
        if kind == "step":
            progress.update(task, completed=event["step"], note=f"loss {event['loss']:.3f}, {event['seconds']:.2f} s")
        elif kind == "built":
            progress.update(task, note=f"{event['parameters'] / 1e9:.3f} G parameters")
            result.update(event)
        elif kind == "patched":
            result.update(patched=event["report"])
        elif kind == "profiling":
            progress.update(task, completed=total - 1, note=f"profiled {event['step']} of {event['of']}")
        else:
            progress.update(task, completed=total - 2, note={"timed": "peak memory by phase", "memory": "profiling"}.get(kind, ""))
            result.update(event)

    result |= collect(f"liger_kernel.cli.profile.{'script' if 'script' in config else 'worker'}", config, seconds, take)
    if result["status"] == "ok" and "parts_ms" not in result:
        result |= {"status": "failed", "error": "the process ended by itself before everything was measured"}
    progress.update(task, completed=total, note=result["status"])
    return result


def run(model, device, minutes, json_path, out, arguments=(), **options):
    """Measures, prints, writes; 1 when an arm failed or was out of time, or the losses disagree, 2 for a model that is none.
    Out of memory is a finding."""
    from liger_kernel.cli import require

    require("transformers", "matplotlib", purpose="liger profile")
    console = record.console()
    try:
        defaults = CPU if device == "cpu" else CUDA
        if is_script(model):
            config = settings_of_script(model, arguments, device, defaults, options["steps"])
        else:
            config = settings(model, device, defaults, **options)
    except ValueError as e:
        console.print(f"[red]{e}[/]", highlight=False)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    begun, results = time.monotonic(), {}
    with bars(console) as progress:
        for arm in ARMS:
            trace = out.resolve() / f"trace-{arm}.json.gz"
            with contextlib.suppress(FileNotFoundError):
                trace.unlink()  # of an earlier run: an arm that fails leaves none
            left = minutes * 60 - (time.monotonic() - begun)
            results[arm] = run_arm(config | {"arm": arm, "trace": str(trace)}, left, progress)
    config |= next((result["script"] for result in results.values() if "script" in result), {})  # model, device, dtype as an arm saw them
    name = pathlib.Path(model).name if "script" in config else model
    return finish(record.document(config["device"], name=name, settings=config, arms=results), json_path, out, console)


def finish(document, json_path, out, console):
    """Table, files, verdict and exit code of a document, measured now or read."""
    from liger_kernel.cli.profile import page, report

    report.derive(document)
    report.show(document, console)
    if json_path is not None:
        record.write(json_path, document, console)
    if out is not None:
        paths = [report.plot(document, out), page.write(document, out)]
        paths += [path for path in (out / f"trace-{arm}.json.gz" for arm in ARMS) if path.exists()]
        console.print("written: " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    console.print(document["verdict"], highlight=False, soft_wrap=True)
    return int(record.failed(document["arms"]) or not document["losses_agree"])


def show_file(path, out):
    """The same from a file that --json wrote."""
    document = record.read(path, ("settings", "arms", "name", "device"), "liger profile")
    if not all("status" in arm and ("parts_ms" not in arm or "peak_bytes" in arm) for arm in document["arms"].values()):
        raise SystemExit(f"{path} has no peak_bytes of an arm: it was not written by `liger profile --json`")
    return finish(document, None, out, record.console())
