"""`liger memory`: peak memory of a training step as transformers ships it (`hf`) and patched, measured beside what formulas.py
predicts, over vocabularies and sequence lengths; the bytes that each op saves; the largest batch or sequence that fits.

Each arm is a process of its own (worker.py).
"""

import re
import time

from liger_kernel.cli import record
from liger_kernel.cli.memory.formulas import ARMS

CPU = {"batch": 2, "seq": 256, "dtype": "float32", "vocabs": [2048, 8192, 32768], "seqs": [128, 256, 512], "limit": 256_000_000}
CUDA = {"batch": 4, "seq": 4096, "dtype": "bfloat16", "vocabs": [32768, 128256, 151936, 262144, 1048576],
        "seqs": [1024, 2048, 4096, 8192], "limit": None}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
RESOLUTION = {"batch": 0.0, "seq": 1 / 64}


def parse_bytes(text):
    """ "80GB", "256 MiB" or "1000" as bytes; ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if not match or not float(match[1]):
        raise ValueError(f"{text!r} is no size; write 80GB, 256MiB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2] or ""])


def parse_numbers(text, option):
    """ "32k,128256,1M" as numbers (k is 1024, M its square); ValueError for anything else."""
    found = []
    for part in text.lower().split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)\s*([km]?)\s*", part)
        if not match:
            raise ValueError(f"{option} is {text!r}, expected numbers joined by commas, such as 32768,128k,1M")
        found.append(int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2]])
    return sorted(set(found))


def points_of(config):
    """[(vocabulary, batch, sequence)]: each vocabulary at the given sequence, each sequence at the model's vocabulary, which comes
    last and ends with the given size."""
    vocab, batch, seq = config["model"]["vocab_size"], config["batch"], config["seq"]
    return ([(v, batch, seq) for v in config["vocabs"] if v != vocab]
            + [(vocab, batch, s) for s in config["seqs"] if s != seq] + [(vocab, batch, seq)])


def multiplies_16_bits(device, dtype):
    """Whether the fused loss multiplies operands of this dtype as they are (a CPU may need fp32)."""
    from liger_kernel import _native

    if device != "cpu" or dtype == "float32":
        return True
    return "products in bf16" in _native.explain("fused_linear_cross_entropy", [4096, 64, 4096], "bf16", -1)[1]


def run_arm(config, seconds, progress):
    """What one worker measured, with `status`."""
    from liger_kernel.cli.bench.report import size
    from liger_kernel.cli.profile import collect

    count, result = len(config["points"]), {"points": []}
    task = progress.add_task(config["arm"], total=None if config["fit"] else count + 1, note="starting")

    def take(event):
        kind = event.pop("event")
        if kind == "point":
            result["points"].append(event)
            peak = size(max(event["peak_bytes"].values())) if "peak_bytes" in event else event["status"]
            progress.update(task, advance=1, note=f"V = {event['vocab']}, {event['batch']} x {event['seq']}: {peak}")
        elif kind == "try":
            result.setdefault("tries", []).append(event)
            progress.update(task, note=f"{config['fit']} {event['n']} {'fits' if event['fits'] else 'does not fit'}")
        elif kind == "patched":
            result["patched"] = event["report"]
        else:
            result[kind] = event

    result |= collect("liger_kernel.cli.memory.worker", config, seconds, take)
    if config["fit"] and "fit" not in result:  # the system ended it, or time did: what is known by then
        good = [attempt["n"] for attempt in result.get("tries", ()) if attempt["fits"]]
        result["fit"] = {"what": config["fit"], "largest": max(good, default=0), "limit": config["limit"], "predicted": None,
                         "resolution": None, "error": result.get("error"), "capped": False}
    progress.update(task, total=1, completed=1, note=result["status"])
    return result


def run(model, device, minutes, json_path, out, *, vocabs, seqs, fit, limit, **options):
    """Measures, prints, writes; 1 when an arm failed or was out of time (out of memory is a finding), 2 for options that mean nothing."""
    from liger_kernel.cli import require
    from liger_kernel.cli.profile import bars, settings

    require("transformers", "matplotlib", purpose="liger memory")
    console = record.console()
    defaults = CPU if device == "cpu" else CUDA
    try:
        config = settings(model, device, defaults, weights=False, **options)
        config["vocabs"] = parse_numbers(vocabs, "--vocabs") if vocabs else config["vocabs"]
        config["seqs"] = parse_numbers(seqs, "--seqs") if seqs else config["seqs"]
        config["limit"] = parse_bytes(limit) if limit else config["limit"]
        if "vocab_size" not in config["model"]:
            raise ValueError(f"the configuration of {model} has no vocab_size: `liger memory` takes language models without other parts")
        if min(config["vocabs"]) < 8 or min(config["seqs"]) < 2:
            raise ValueError("--vocabs takes numbers of at least 8, --seqs of at least 2")
    except ValueError as e:
        console.print(f"[red]{e}[/]", highlight=False)
        return 2
    config |= {"native": multiplies_16_bits(device, config["dtype"]), "fit": fit, "points": [] if fit else points_of(config),
               "resolution": RESOLUTION.get(fit), "most": 1 << 20}
    begun, results = time.monotonic(), {}
    with bars(console) as progress:
        for arm in ARMS:
            results[arm] = run_arm(config | {"arm": arm}, minutes * 60 - (time.monotonic() - begun), progress)
    return finish(record.document(device, name=model, settings=config, arms=results), json_path, out, console)


def finish(document, json_path, out, console):
    """Tables, files, verdict and exit code of a document, measured now or read."""
    from liger_kernel.cli.memory import report
    from liger_kernel.cli.profile.page import page

    report.derive(document)
    sections = report.sections(document)
    report.show(document, sections, console)
    if json_path is not None:
        record.write(json_path, document, console)
    if out is not None:
        images = [report.plot(document, out)] if any(arm["points"] for arm in document["arms"].values()) else []
        path = out / "memory.html"
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(page("Memory of a training step", document, sections, images), encoding="utf-8")
        console.print("written: " + ", ".join(map(str, [*images, path])), highlight=False, soft_wrap=True)
    console.print(document["verdict"], highlight=False, soft_wrap=True)
    return int(record.failed(document["arms"]))


def show_file(path, out):
    """The same from a file that --json wrote."""
    document = record.read(path, ("settings", "arms", "name", "device"), "liger memory")
    if not all("points" in arm and "status" in arm for arm in document["arms"].values()):
        raise SystemExit(f"{path} has no points of an arm: it was not written by `liger memory --json`")
    return finish(document, None, out, record.console())


def show_predicted(batch, seq, checkpointing):
    """Only the table of sizes that do not fit here; measures nothing."""
    from liger_kernel.cli.memory import report

    console = record.console()
    report.print_section(report.predicted_section(batch or CUDA["batch"], seq or CUDA["seq"], checkpointing), console)
    return 0
