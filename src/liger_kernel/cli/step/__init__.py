"""`liger bench step`: whole training steps of a causal language model with random weights, each arm in a process of its own.

Arms: `hf` is transformers as it ships, `compile` the same under torch.compile, `patched` with our kernels, `fused` with
these and each layer's residual addition in the norm after it (fuse_residual_norms). All start from the same
weights and see the same random tokens. Time is the median of a few steps after warm-up; memory is that of the timed steps; a
further step, which is not timed, runs under the profiler.
"""

import json
import os
import sys
import time

from liger_kernel.cli import record
from liger_kernel.cli.child import Child

ARMS = ("hf", "compile", "patched", "fused")
CUDA = {"batch": 4, "seq": 4096, "dtype": "bfloat16"}
CPU = {"batch": 2, "seq": 128, "dtype": "float32"}


def run_arm(config, seconds, say):
    """What one worker measured, with `status`: ok, out of memory, out of time, or failed."""
    arm = config["arm"]
    if seconds <= 0:
        return {"status": "out of time", "error": "not started"}
    child, result, lines = Child([sys.executable, "-m", "liger_kernel.cli.step.worker", json.dumps(config)], dict(os.environ)), {}, 0
    say(f"{arm}: starting")
    for event in child.events(seconds):
        kind = event.pop("event")
        if kind == "step":
            lines = event["step"]
            say(f"{arm}: step {lines} of {event['of']}, {event['seconds']:.3f} s, loss {event['loss']:.4f}")
        elif kind == "built":
            say(f"{arm}: {event['parameters'] / 1e9:.3f} G parameters in {event['seconds']:.1f} s")
            result["parameters"] = event["parameters"]
        elif kind == "patched":
            result["patched"] = event["report"]
        elif kind == "out of memory":
            result |= {"status": kind, "error": event["error"]}
        else:
            result |= event
    if child.stopped:
        result |= {"status": "out of time", "error": f"stopped after {seconds:.0f} s and {lines} steps"}
    elif child.process.returncode == -9:
        result |= {"status": "out of memory", "error": f"killed by the system after {lines} steps"}
    elif child.failure():
        result |= {"status": "failed", "error": child.failure()}
    result.setdefault("status", "ok")
    say(f"{arm}: {result['status']}" + (f" ({result['error'].splitlines()[-1]})" if "error" in result else ""))
    return result


def run(model, device, arms, minutes, json_path, plots, **options):
    """Measures, prints, writes; 1 when an arm failed or was out of time, or the losses disagree; out of memory is a finding."""
    from liger_kernel.cli import require
    from liger_kernel.cli.step import configs

    require("transformers", purpose="liger bench step")
    console = record.console()
    try:
        entries = configs.numbers(model, options.pop("layers"))
    except ValueError as e:
        console.print(f"[red]{e}[/]", highlight=False)
        return 2
    defaults = CPU if device == "cpu" else CUDA
    config = defaults | {k: v for k, v in options.items() if v is not None} | {"device": device, "model": entries, "seed": 0}
    begun, results = time.monotonic(), {}
    for arm in arms:
        left = minutes * 60 - (time.monotonic() - begun)
        results[arm] = run_arm(config | {"arm": arm}, left, lambda text: console.print(text, highlight=False, markup=False))
    document = record.document(device, name=model, settings=config, arms=results)
    return finish(document, json_path, plots, console)


def finish(document, json_path, plots, console):
    """Tables, file, plot and exit code of a document, measured now or read."""
    from liger_kernel.cli.step import report

    report.derive(document)
    report.show(document, console)
    if json_path is not None:
        record.write(json_path, document, console)
    if plots is not None:
        console.print(f"plot: {report.plot(document, plots)}", highlight=False)
    return int(record.failed(document["arms"]) or not document["losses_agree"])


def show_file(path, plots):
    """The same from a file that --json wrote."""
    return finish(record.read(path, ("settings", "arms", "name"), "liger bench step"), None, plots, record.console())
