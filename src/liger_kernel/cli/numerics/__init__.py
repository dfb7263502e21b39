"""`liger numerics`: the error of every op against fp64 beside eager PyTorch's and the bound, and of every replaced module of a model.

What is compared is what each op's own tests compare (see measure.py), on inputs of several regimes (see grid.py).
"""

import importlib
import time

from liger_kernel.cli import record

DTYPES = ("float32", "bfloat16", "float16")
NEEDS = ("results", "modules", "missing", "device")


def known():
    """{op: module that has its cases, or None}, of every op folder."""
    folders = sorted(p.parent for p in (record.PACKAGE / "ops").glob("*/cases.py"))
    return {f.name: f"liger_kernel.ops.{f.name}.numerics" if (f / "numerics.py").exists() else None for f in folders}


def measure_op(op, module, device, dtype):
    """(rows, failures) of one op and dtype name; a failure is whatever else its check says, or raises."""
    import torch

    from liger_kernel.cli.numerics.measure import recording

    rows, failures = [], []
    torch.manual_seed(0)
    where = {"op": op, "dtype": dtype}
    try:
        for regime, case, call in importlib.import_module(module).cases(device, getattr(torch, dtype)):
            here = where | {"regime": regime, "case": case}
            with recording() as found:
                try:
                    call()
                except Exception as e:  # noqa: BLE001 - whatever it is, it is reported and the rest still runs
                    failures.append(here | {"error": f"{type(e).__name__}: {str(e)[:300]}"})
            rows += [here | row for row in found]
            if not found:
                failures.append(here | {"error": "its check compared nothing"})
    except Exception as e:  # noqa: BLE001
        failures.append(where | {"regime": "", "case": "", "error": f"{type(e).__name__}: {str(e)[:300]}"})
    return rows, failures


def run(ops, device, dtypes, json_path, plots):
    """Measures, prints, writes; 1 when something is outside its bound or failed, 2 for an unknown op."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = record.console()
    modules = known()
    unknown = sorted(set(ops) - set(modules))
    if unknown:
        console.print(f"[red]no op is called {', '.join(unknown)}; there are: {', '.join(modules)}[/]", highlight=False)
        return 2
    wanted = {op: module for op, module in modules.items() if not ops or op in ops}
    missing = [[op, "no cases for `liger numerics`"] for op, module in wanted.items() if module is None]
    begun, results, failures, gates = time.monotonic(), [], [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(dtypes) * (len(wanted) - len(missing)) + (not ops))
        for op, module in wanted.items():
            if module is None:
                continue
            try:
                importlib.import_module(module)
            except ImportError as e:  # the tests' files are not part of a wheel
                missing.append([op, f"its checks need a source tree with pytest: {e}"])
                progress.advance(task, len(dtypes))
                continue
            for dtype in dtypes:
                progress.update(task, description=f"{op} {dtype}")
                rows, failed = measure_op(op, module, device, dtype)
                results += rows
                failures += failed
                progress.advance(task)
        if not ops:
            progress.update(task, description="modules of a Llama")
            try:
                from liger_kernel.cli.numerics.modules import gate

                gates = gate(device)
            except ImportError as e:
                missing.append(["modules", f"transformers is not installed: {e}"])
            progress.advance(task)
    document = record.document(device, dtypes=list(dtypes), seconds=time.monotonic() - begun, results=results, failures=failures,
                               modules=gates, missing=missing)
    return finish(document, json_path, plots, console)


def finish(document, json_path, plots, console):
    """Tables, file, plot, verdict and exit code of a document, measured now or read."""
    from liger_kernel.cli.numerics import report

    report.show(document, console)
    if json_path is not None:
        record.write(json_path, document, console)
    if plots is not None and document["results"]:
        console.print(f"plot: {report.plot(document, plots)}", highlight=False)
    good, sentence = report.verdict(document)
    console.print(f"[bold {'green' if good else 'red'}]{sentence}[/]", highlight=False, soft_wrap=True)
    return 0 if good else 1


def show_file(path, ops, plots):
    """The same from a file that --json wrote, of `ops` (all when empty)."""
    console = record.console()
    document = record.read(path, NEEDS, "liger numerics")
    unknown = sorted(set(ops) - {row["op"] for row in document["results"]})
    if unknown:
        console.print(f"[red]{path} has no {', '.join(unknown)}[/]", highlight=False)
        return 2
    if ops:
        for key in ("results", "failures"):
            document[key] = [row for row in document[key] if row["op"] in ops]
        document["modules"], document["missing"] = [], []
    return finish(document, None, plots, console)
