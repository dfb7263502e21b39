"""`liger bench`: finds every op's bench.py and times its contenders in a process of their own.

On the CPU each heap is a process: "warm" keeps freed pages inside the process, as a long training run under a caching
allocator does; "default" is glibc's malloc as it ships, which gives large blocks back and pays a page fault for every 4 KiB of
the next one. Eager code gains most from the warm heap, so both are reported.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import sys
import threading

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from liger_kernel.cli import record
from liger_kernel.cli.child import Child

ROOT = record.PACKAGE
# No block is mapped on its own, none goes back to the system, all threads share one arena.
WARM = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20), "MALLOC_ARENA_MAX": "1"}


def environment(heap, package):
    env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    if heap == "warm":
        env |= WARM
    if package:  # the other package finds its own native parts
        env.pop("LIGER_KERNEL_LIBRARY", None)
        env["PYTHONPATH"] = package
    return env


class Turns:
    """Lets one of several workers run at a time, first come first served."""

    def __init__(self):
        self.condition, self.queue = threading.Condition(), collections.deque()

    def take(self):
        ticket = object()
        with self.condition:
            self.queue.append(ticket)
            self.condition.wait_for(lambda: self.queue[0] is ticket)

    def give(self):
        with self.condition:
            self.queue.popleft()
            self.condition.notify_all()


def work(config, heap, progress, turns):
    """Runs one worker and returns (results, failures)."""
    label = config["device"] if heap is None else f"{config['device']}, {heap} heap"
    label += ", the other package" if config["package"] else ", beside it" if config["paired"] else ""
    task = progress.add_task(label, total=None)
    command = [sys.executable, str(pathlib.Path(__file__).with_name("worker.py")), json.dumps(config | {"root": str(ROOT)})]
    results, failures = [], []
    turns.take()
    try:
        child = Child(command, environment(heap, config["package"]))
        for event in child.events():
            kind = event.pop("event")
            if kind == "ready":
                turns.give()
                turns.take()
                child.answer()
            elif kind == "plan":
                progress.update(task, total=event["cases"])
            elif kind == "start":
                progress.update(task, description=f"{label}: {event['op']} {event['case']}")
            elif kind == "done":
                progress.advance(task)
            elif kind == "result":
                results.append(event | {"heap": heap})
            else:
                failures.append(event | {"heap": heap})
    finally:
        turns.give()
    if child.failure(4):
        failures.append({"op": "", "case": "", "contender": "", "heap": heap, "error": child.failure(4)})
    return results, failures


def work_paired(config, heap, progress, package):
    """This package and another one, each in its process, taking turns round by round: ((results, failures), the same)."""
    config = config | {"compile": False, "contenders": ["liger", "eager"], "paired": True}
    turns = Turns()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(work, config | {"package": p}, heap, progress, turns) for p in (None, package)]
        return [run.result() for run in runs]


def merge(results, ours, theirs, key):
    """Adds the other package's contenders to `results` as "against" and "against eager" (a control: the same code in both).

    Their ratios are to `ours`, a process that ran the same contenders in turn with it: what runs beside a contender changes the
    heap that it meets, by 10-30 % on the CPU."""
    def by_key(rows):
        return {(r["op"], r["case"], r["pass"], r["heap"]): r["contenders"] for r in rows}

    table, paired = by_key(results), by_key(ours)
    for where, contenders in by_key(theirs).items():
        for name, contender in contenders.items():
            mate = paired.get(where, {}).get(name)
            if where not in table or mate is None:
                continue
            contender["ratio"] = contender[key]["median"] / mate[key]["median"]
            contender["paired_with"] = mate
            if "cpu_ms" in mate and mate["cpu_ms"]["median"]:
                contender["cpu_ratio"] = contender["cpu_ms"]["median"] / mate["cpu_ms"]["median"]
            table[where]["against" if name == "liger" else f"against {name}"] = contender


def run(ops, device, match, rounds, compile, heap, against, json_path, plots=None):
    """Measures, prints, writes; 1 when something failed, 2 when there was nothing to measure."""
    from liger_kernel.cli.bench import report
    from liger_kernel.cli.bench.worker import benches

    console = record.console()
    known = sorted(p.parent.name for p in benches(ROOT))
    unknown = sorted(set(ops) - set(known))
    if unknown:
        console.print(f"[red]no bench.py for {', '.join(unknown)}; there are: {', '.join(known) or 'none'}[/]")
        return 2
    config = {"ops": ops, "device": device, "match": match, "rounds": rounds, "compile": compile, "contenders": None, "package": None,
              "paired": False}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    heaps = [None] if device != "cpu" else ["warm", "default"] if heap == "both" else [heap]
    results, failures = [], []
    for each in heaps:
        with Progress(*columns, console=console, transient=True) as progress:
            ours, failed = work(config, each, progress, Turns())
            if against is not None:
                (beside, _), (theirs, more) = work_paired(config, each, progress, str(against.resolve()))
                merge(ours, beside, theirs, report.time_key(device))
                failed += [f | {"contender": f"against {f['contender']}".strip()} for f in more]
        results += ours
        failures += failed
    document = record.document(device, against=against and against.name, against_commit=against and record.commit(against), rounds=rounds,
                               results=results, failures=failures)
    return finish(document, match, json_path, plots, console)


def finish(document, match, json_path, plots, console):
    """Tables, file, plots and exit code of a document, measured now or read."""
    from liger_kernel.cli.bench import plots as drawing
    from liger_kernel.cli.bench import report

    results, failures, device = document["results"], document["failures"], document["device"]
    report.derive(results, device)
    report.show(results, failures, device, console)
    if json_path is not None:
        record.write(json_path, document, console)
    if plots is not None:
        for path in drawing.write(plots, results, device):
            console.print(f"plot: {path}", highlight=False)
    if not results and not failures:
        console.print(f"no case matches {match!r}" if match else "no op has a bench.py")
        return 2
    return 1 if failures else 0


def show_file(path, ops, match, plots=None):
    """Tables and plots from a file that --json wrote: those of `ops` (all when empty) whose name contains `match`."""
    console = record.console()
    document = record.read(path, ("device", "results", "failures"), "liger bench")
    unknown = sorted(set(ops) - {r["op"] for r in document["results"]})
    if unknown:
        console.print(f"[red]{path} has no {', '.join(unknown)}[/]", highlight=False)
        return 2
    for key in ("results", "failures"):
        document[key] = [r for r in document[key] if (not ops or r["op"] in ops) and match in f"{r['op']} {r['case']}"]
    return finish(document, match, None, plots, console)
