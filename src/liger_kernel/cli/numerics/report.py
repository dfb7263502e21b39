"""Tables, the heat map and the verdict of `liger numerics`."""

from liger_kernel.cli.numerics.grid import REGIMES
from liger_kernel.cli.record import figure

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
PASSES = ("forward", "gradient")


def worst(rows):
    """The row whose error is the largest part of its bound."""
    return max(rows, key=lambda row: row["ours"]["of_bound"])


def _pair(row, key, digits):
    """Ours and, where there is one, eager's."""
    eager = "" if row["eager"] is None else f" ({row['eager'][key]:{digits}})"
    return f"{row['ours'][key]:{digits}}{eager}"


def show(document, console):
    from rich.table import Table

    results = document["results"]
    if results:
        table = Table("op", "dtype", "", title=f"largest error of {len(results)} tensors on {document['device']}", title_justify="left",
                      caption="Ours, and eager PyTorch's in brackets, at the tensor whose error is the largest part of its bound: derived\n"
                              "error and one rounding. ULPs are the most of any element not below a thousandth of the tensor's largest.",
                      caption_justify="left")
        for column in ("of bound", "ULPs", "absolute", "regime, case, tensor"):
            table.add_column(column, justify="right" if column != "regime, case, tensor" else "left")
        groups = {}
        for row in results:
            groups.setdefault((row["op"], row["dtype"], row["pass"]), []).append(row)
        for (op, dtype, which), rows in groups.items():
            row = worst(rows)
            style = "red" if any(r["failed"] for r in rows) else None
            numbers = (_pair(row, key, digits) for key, digits in (("of_bound", ".2f"), ("ulps", ".3g"), ("absolute", ".1e")))
            table.add_row(op, SHORT[dtype], which, *numbers, f"{row['regime']}, {row['case']}, {row['what']}", style=style)
        console.print(table)
    if document["modules"]:
        table = Table("module", "tensor", title="modules of a Llama in bf16, patched beside transformers", title_justify="left",
                      caption="Difference and error relative to the largest element; errors to fp64, in brackets those of transformers.\n"
                              "Outside: elements that differ by more than 1e-3 of the largest, and not within one bf16 rounding of fp64;\n"
                              "an output may have none, a gradient only where its error is no worse than twice transformers'.",
                      caption_justify="left")
        for column in ("difference", "same bits", "error", "ULPs", "outside"):
            table.add_column(column, justify="right")
        for row in document["modules"]:
            table.add_row(row["module"], row["what"], f"{row['difference']:.1e}", f"{row['same_bits']:.1%}",
                          f"{row['error']:.1e} ({row['error_of_transformers']:.1e})",
                          f"{row['ulps']:.3g} ({row['ulps_of_transformers']:.3g})", f"{row['outside']} of {row['elements']}",
                          style=None if row["passes"] else "red")
        console.print(table)
    for row in results:
        if row["failed"]:
            console.print(f"[red]{row['op']} {row['dtype']} {row['regime']} {row['case']}: {row['failed']}[/]", highlight=False)
    for row in document["failures"]:
        console.print(f"[red]{row['op']} {row['dtype']} {row['regime']} {row['case']}: {row['error']}[/]", highlight=False)
    for what, why in document["missing"]:
        console.print(f"[yellow]{what} was not measured: {why}[/]", highlight=False)


def verdict(document):
    """(whether everything passes, the sentence that says it)."""
    results, modules = document["results"], document["modules"]
    bad = sum(row["failed"] is not None for row in results)
    outside = sum(not row["passes"] for row in modules)
    ops = len({row["op"] for row in results})
    parts = []
    if results:
        row = worst(results)
        parts.append(f"{len(results) - bad} of {len(results)} tensors of {ops} ops within their bounds and no worse than twice eager's "
                     f"error (largest part of a bound: {row['ours']['of_bound']:.2f}, {row['op']} {SHORT[row['dtype']]})")
    if modules:
        parts.append(f"{len(modules) - outside} of {len(modules)} tensors of replaced modules pass beside transformers in bf16")
    if document["failures"]:
        parts.append(f"{len(document['failures'])} checks failed")
    if document["missing"]:
        parts.append(f"not measured: {', '.join(what for what, _ in document['missing'])}")
    good = bool(results or modules) and not (bad or outside or document["failures"])
    return good, f"{'PASS' if good else 'FAIL'}: {'; '.join(parts) or 'nothing was measured'}."


def plot(document, folder):
    """numerics.png in `folder`: ops over dtype and regime, the largest part of the bound that an error is; its path."""
    from matplotlib.colors import TwoSlopeNorm

    results = document["results"]
    ops = sorted({row["op"] for row in results})
    columns = [(d, r) for d in SHORT for r in REGIMES if any((row["dtype"], row["regime"]) == (d, r) for row in results)]
    folder.mkdir(parents=True, exist_ok=True)
    fig = figure(5 + 1.05 * len(columns), 2.2 + 0.3 * len(ops))
    for which, axes in zip(PASSES, fig.subplots(1, 2, sharey=True), strict=True):
        cells = [[float("nan")] * len(columns) for _ in ops]
        for row in results:
            if row["pass"] == which:
                i, j = ops.index(row["op"]), columns.index((row["dtype"], row["regime"]))
                value = cells[i][j]
                cells[i][j] = row["ours"]["of_bound"] if value != value else max(value, row["ours"]["of_bound"])
        image = axes.imshow(cells, cmap="RdYlGn_r", norm=TwoSlopeNorm(1.0, 0.0, 2.0), aspect="auto")
        for i, line in enumerate(cells):
            for j, value in enumerate(line):
                if value == value:
                    axes.text(j, i, f"{value:.2f}" if value < 100 else ">99", ha="center", va="center", fontsize=6.5)
        axes.set_xticks(range(len(columns)), [f"{SHORT[d]} {r}" for d, r in columns], rotation=60, ha="right", fontsize=8)
        axes.set_yticks(range(len(ops)), ops, fontsize=8)
        axes.set_title("forward" if which == "forward" else "gradients", fontsize=10)
    fig.colorbar(image, ax=fig.axes, label="largest error / (bound + one rounding)", shrink=0.8)
    fig.suptitle(f"Error against fp64 as a part of the bound, {document['device']}: above 1 fails", fontsize=11)
    path = folder / "numerics.png"
    fig.savefig(path)
    return path
