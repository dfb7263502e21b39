"""`liger models`: what each row replaces in a tiny random model, what it leaves and why, and how far the numbers move."""

import collections
import json
import pathlib
import time

from rich.table import Table

from liger_kernel.cli import record

FAR = 1e-4  # an fp32 difference that rounding does not explain


def _counted(names):
    return [f"{count} {name}" if count > 1 else name for name, count in collections.Counter(names).items()]


def measure(model_type, device="cpu"):
    """One row of the table as plain data: differences are relative to the largest element, gradients the worst of all parameters."""
    import dataclasses

    from liger_kernel.patch import compare, unpatch

    start = time.perf_counter()
    try:
        report, fp32, bf16, eager = compare.compare(model_type, device)
    except (ImportError, AttributeError, KeyError, ValueError) as error:  # the installed transformers does not know the type
        return dict(model_type=model_type, error=f"{type(error).__name__}: {error}")
    finally:
        unpatch()
    return dict(
        model_type=model_type, seconds=time.perf_counter() - start,
        replaced=[dict(where=where, was=was, now=now) for where, was, now in report.replaced],
        left=[dict(where=where, why=why) for where, why in report.left],
        fp32=dataclasses.asdict(fp32), bf16=dataclasses.asdict(bf16), bf16_unpatched=dataclasses.asdict(eager),
    )


HEAD = ("model type", "replaced", "left, and why", "fp32 logits", "loss", "gradients", "bf16 logits", "loss", "gradients")


def cells(result):
    """A row of the table as strings."""
    if "error" in result:
        return [result["model_type"], f"[red]{result['error']}[/]", *[""] * 7]
    fp32, bf16, eager = result["fp32"], result["bf16"], result["bf16_unpatched"]
    style = "red" if max(fp32.values()) > FAR else "green"
    return [
        result["model_type"],
        ", ".join(_counted(r["now"].removesuffix(" (whole process)") for r in result["replaced"])),
        ", ".join(_counted(r["why"] for r in result["left"])),
        *(f"[{style}]{fp32[what]:.0e}[/]" for what in ("logits", "loss", "gradients")),
        *(f"{bf16[what]:.0e} ({eager[what]:.0e})" for what in ("logits", "loss", "gradients")),
    ]


def run(types, device="cpu", json_path=None):
    """Prints a line per model type; for all that have a row when `types` is empty.

    Returns:
        The exit code: 1 when a type failed or moved too far, 2 when one has no row.
    """
    import transformers

    from liger_kernel.patch.models import by_type

    transformers.logging.set_verbosity_error()
    console = record.console()
    unknown = [t for t in types if t not in by_type()]
    if unknown:
        console.print(f"[red]no row for {', '.join(unknown)}; there are {', '.join(by_type())}[/]", highlight=False)
        return 2
    results = []
    table = Table(
        *HEAD, title=f"tiny random models on {device}, transformers {transformers.__version__}", title_justify="left",
        caption="Largest differences, relative: in fp32 to the unpatched model; in bf16 to that model in fp32 (and the unpatched\n"
                "bf16 model's own difference to it).", caption_justify="left")
    with console.status("") as status:
        for model_type in types or by_type():
            status.update(model_type)
            results.append(measure(model_type, device))
            table.add_row(*cells(results[-1]))
    console.print(table)
    if json_path is not None:
        found = record.document(device, models=results)
        pathlib.Path(json_path).write_text(json.dumps(found, indent=1) + "\n")
    failed = [r["model_type"] for r in results if "error" in r or max(r["fp32"].values()) > FAR]
    verdict = f"[red]failed: {', '.join(failed)}[/]" if failed else "every row is inside the bound"
    console.print(f"{len(results)} model types: {verdict}", highlight=False)
    return int(bool(failed))
