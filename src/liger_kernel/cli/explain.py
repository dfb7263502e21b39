"""`liger ops` and `liger explain`: the registry of the native library as tables."""

import math
import pathlib

from rich.table import Table

from liger_kernel.cli import record

MARK = {"chosen": "[bold green]chosen[/]", "able": "able", "refused": "[dim]refused[/]"}


def parse_shape(text):
    """ "8192x4096" -> [8192, 4096]; ValueError for anything else, and for more elements than 64 bits count."""
    parts = text.lower().replace(",", "x").split("x")
    if not all(p.isdigit() for p in parts):
        raise ValueError(f"the shape {text!r} is not numbers joined by x, such as 8192x4096")
    shape = [int(p) for p in parts]
    if max(math.prod(shape), *shape) >= 2**63:
        raise ValueError(f"the shape {text!r} has more elements than 64 bits count")
    return shape


def device_index(device):
    """The native library's number for a torch device string: -1 is the CPU."""
    return -1 if device == "cpu" else int(device.partition(":")[2] or 0)


def show_ops():
    """Prints every op of this build, how explain reads its shape, and its variants."""
    from liger_kernel import _native

    table = Table("op", "shape", "variants, best first")
    for name, shape, variants in _native.list_ops():
        table.add_row(name, shape, "  ".join(variants))
    record.console().print(table)


def _composed(op):
    """What to say of an op without kernels of its own; None for others."""
    from liger_kernel import _native, ops

    folder = pathlib.Path(ops.__file__).parent / op
    if op.isidentifier() and (folder / "__init__.py").exists() and op not in [name for name, *_ in _native.list_ops()]:
        return f"{op} has no kernels of its own: it is made of ops that `liger ops` lists and of PyTorch's; {op}/README.md says how"
    return None


def show(op, shape, dtype, device):
    """Prints one row per variant and the plan. Returns the exit code: 2 for a question that the op does not understand."""
    from liger_kernel import _native

    console = record.console()
    try:
        rows, plan = _native.explain(op, parse_shape(shape), dtype, device_index(device))
    except ValueError as e:
        console.print(f"[red]{_composed(op) or e}[/]", highlight=False)
        return 2
    title = f"{op} {shape} {dtype} on {_native.machine(device_index(device))}"
    table = Table("pass", "variant", "", "why", title=title, title_justify="left")
    previous = None
    for pass_name, variant, mark, reason in rows:
        why = {"chosen": f"the first that runs here ({reason})", "able": f"would run ({reason})"}.get(mark, reason)
        table.add_row("" if pass_name == previous else pass_name, variant, MARK[mark], why)
        previous = pass_name
    console.print(table)
    if plan:
        console.print(f"plan: {plan}", highlight=False)
    return 0
