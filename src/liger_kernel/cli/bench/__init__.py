"""`liger bench`: finds every op's bench.py and times its contenders in a process of their own.

On the CPU each heap is a process: "warm" keeps freed pages inside the process, as a long training run under a caching
allocator does; "default" is glibc's malloc as it ships, which gives large blocks back and pays a page fault for every 4 KiB of
the next one. Eager code gains most from the warm heap, so both are reported.
"""

import collections
import concurrent.futures
import datetime
import json
import os
import pathlib
import subprocess
import sys
import threading

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

MARK = "LIGER_BENCH "  # as in worker.py
ROOT = pathlib.Path(__file__).parents[2]
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
    results, failures, errors = [], [], []
    turns.take()
    try:
        with subprocess.Popen(command, env=environment(heap, config["package"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as process:
            reader = threading.Thread(target=lambda: errors.extend(process.stderr))
            reader.start()
            for line in process.stdout:
                if not line.startswith(MARK):
                    continue
                event = json.loads(line[len(MARK) :])
                kind = event.pop("event")
                if kind == "ready":
                    turns.give()
                    turns.take()
                    process.stdin.write("\n")
                    process.stdin.flush()
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
            reader.join()
    finally:
        turns.give()
    if process.returncode != 0:
        error = f"exit code {process.returncode}: {''.join(errors[-4:]).strip()}"
        failures.append({"op": "", "case": "", "contender": "", "heap": heap, "error": error})
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


def commit(folder):
    """The git commit of a folder, with "+changes" when files differ from it; None outside a repository."""
    def git(*arguments):
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return head and head + ("+changes" if git("status", "--porcelain") else "")


def run(ops, device, match, rounds, compile, heap, against, json_path):
    """Measures, prints, writes; 1 when something failed, 2 when there was nothing to measure."""
    from liger_kernel import env_report
    from liger_kernel.cli.bench import report

    console = Console()
    known = sorted(p.parent.name for p in (ROOT / "ops").glob("*/bench.py"))
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
    report.derive(results, device)
    report.show(results, failures, device, console)
    if json_path is not None:
        document = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "device": device,
                    "environment": env_report.facts(), "commit": commit(ROOT), "against": against and against.name,
                    "against_commit": against and commit(against), "rounds": rounds, "results": results, "failures": failures}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(document, indent=1) + "\n")
        console.print(f"every number: {json_path}", highlight=False)
    if not results and not failures:
        console.print(f"no case matches {match!r}" if match else "no op has a bench.py")
        return 2
    return 1 if failures else 0
