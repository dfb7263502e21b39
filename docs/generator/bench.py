"""A file of `liger bench` -> Markdown: a section per op and heap; times, sizes and shares are written as the command does."""

from generator.text import cell, table
from liger_kernel.cli.bench import report


def groups(document):
    """{(op, heap): its results}."""
    found = {}
    for row in document["results"]:
        found.setdefault((row["op"], row["heap"]), []).append(row)
    return found


def pictures(document):
    """{(op, heap): the file's name}, as the command's plots are named."""
    return {(op, heap): f"{op}-{heap}.png" if heap else f"{op}.png" for (op, heap), rows in groups(document).items()
            if any(row["contenders"] for row in rows)}


def contenders(rows):
    """The contenders beside "liger" of some results, in the order of `liger bench`."""
    return [name for name in report.names_of({"contenders": {n: 0 for r in rows for n in r["contenders"]}}) if name != "liger"]


def yardsticks(rows):
    """Least and largest copy bandwidth and rate of products measured beside the rows."""
    words = []
    for key, unit, digits in (("copy_gb_s", "copy {} GB/s", 0), ("gemm_tflop_s", "products {} TFLOP/s", 1)):
        rates = [f"{r[key]:.{digits}f}" for r in rows if r.get(key)]
        if rates:
            words.append(unit.format(" to ".join(dict.fromkeys((min(rates, key=float), max(rates, key=float))))))
    return ", ".join(words)


def results_table(rows, device):
    """A line per case and pass: our time, share, each contender's time as a multiple of ours, and everybody's peak of extra memory."""
    cpu = device == "cpu"
    names = contenders(rows)
    head = ["case", "pass", "wall ms" if cpu else "kernel ms", "spread", "CPU ms" if cpu else "call ms", "of copy or products",
            *(f"{name} / ours" + (", wall (CPU)" if cpu else "") for name in names), *(f"memory, {name}" for name in ("ours", *names))]
    lines = []
    for row in rows:
        found = row["contenders"]
        line = [cell(row["case"]), row["pass"], *our_cells(row, device)]
        for name in names:
            other = found.get(name, {})
            ratio = f"{other['ratio']:.2f}x" if "ratio" in other else ""
            line.append(f"{ratio} ({other['cpu_ratio']:.2f}x)" if "cpu_ratio" in other else ratio)
        lines.append(line + [report.size(found[name]["peak_bytes"]) if name in found else "" for name in ("liger", *names)])
    return table(head, lines, "ll" + "r" * (len(head) - 2))


def our_cells(row, device):
    """Time, spread, second time and share of "liger"; empty where it failed."""
    ours = row["contenders"].get("liger")
    if ours is None:
        return [""] * 4
    time, second = ours[report.time_key(device)], ours["cpu_ms" if device == "cpu" else "wall_ms"]
    # Beside a rate of products, but without a number of operations, bytes say nothing.
    share = "" if row["gemm_tflop_s"] and not row["flops"] else report.share_of(ours, " of copy", " of products")
    return [report.milliseconds(time["median"]), report.spread(time), report.milliseconds(second["median"]), share]


def op_part(document, op, heap, rows, picture, heading):
    """One op's section: heading, yardsticks, picture (an address or None), table."""
    said = yardsticks(rows)
    title = f"{op} on {document['device']}" + (f", {heap} heap" if heap else "")
    return "\n\n".join(filter(None, [heading, f"Measured beside it: {said}." if said else "", picture and f"![{title}]({picture})",
                                     results_table(rows, document["device"])]))


def page(document, images, link):
    """`images`: {(op, heap): address}; `link`: op -> Markdown of its name, as a link where it has a page."""
    parts = ["A multiple above 1: the contender takes longer than this package. Memory is the peak beyond the inputs. The share is of the "
             "copy bandwidth, or of the rate of bare matrix products, measured in the same run; it is far above 100 % where those products "
             "are slow themselves (vocabularies that are no multiple of 8)."]
    for (op, heap), rows in groups(document).items():
        parts.append(op_part(document, op, heap, rows, images.get((op, heap)), f"## {link(op)}" + (f", {heap} heap" if heap else "")))
    if document["failures"]:
        parts += ["## Failed", table(("op", "case", "contender", "error"),
                                     ([cell(f[k]) for k in ("op", "case", "contender", "error")] for f in document["failures"]))]
    return "\n\n".join(parts)
