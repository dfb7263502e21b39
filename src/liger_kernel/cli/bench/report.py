"""Tables of `liger bench`: one per op and heap, one section per shape and pass."""

from rich.table import Table

ORDER = ("liger", "eager", "compile", "torch")


def time_key(device):
    return "wall_ms" if device == "cpu" else "kernel_ms"


def derive(results, device):
    """Adds to every contender its ratio to "liger", its time in us, its rates in GB/s and TFLOP/s by the case's bytes and flops,
    and its share of the measured copy bandwidth and GEMM rate."""
    key = time_key(device)
    for row in results:
        ours = row["contenders"].get("liger")
        for contender in row["contenders"].values():
            seconds = contender[key]["median"] / 1e3
            if ours and "ratio" not in contender:
                contender["ratio"] = contender[key]["median"] / ours[key]["median"]
                if "cpu_ms" in ours and ours["cpu_ms"]["median"]:
                    contender["cpu_ratio"] = contender["cpu_ms"]["median"] / ours["cpu_ms"]["median"]
            contender["us"] = seconds * 1e6
            if row["flops"]:
                contender["tflop_s"] = row["flops"] / seconds / 1e12
                if row["gemm_tflop_s"]:
                    contender["share_of_gemm"] = contender["tflop_s"] / row["gemm_tflop_s"]
            if row["bytes"]:
                contender["gb_s"] = row["bytes"] / seconds / 1e9
                if row.get("copy_gb_s"):  # some files give no copy
                    contender["share_of_copy"] = contender["gb_s"] / row["copy_gb_s"]


def milliseconds(value):
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def share_of(contender, copy=" of copy", gemm=" of GEMM"):
    """The contender's rate as a share of the machine's GEMM rate where matrix products are the work, else of its copy bandwidth."""
    if "share_of_gemm" in contender:
        return f"{contender['share_of_gemm']:.0%}{gemm}"
    return f"{contender['share_of_copy']:.0%}{copy}" if "share_of_copy" in contender else ""


def spread(stats):
    return f"±{(stats['high'] - stats['low']) / 2 / stats['median'] * 100:.0f} %" if stats["median"] else ""


def size(count):
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def names_of(row):
    """A result's contenders in their order."""
    return [n for n in ORDER if n in row["contenders"]] + sorted(set(row["contenders"]) - set(ORDER))


def rows_of(row, device):
    """Table rows of one result."""
    for position, name in enumerate(names_of(row)):
        c = row["contenders"][name]
        stats = c[time_key(device)]
        second = c["cpu_ms"] if device == "cpu" else c["wall_ms"]
        share = share_of(c, "", " GEMM")
        ratio = f"{c['ratio']:.2f}x" if "ratio" in c else ""
        cpu_ratio = f"{c['cpu_ratio']:.2f}x" if "cpu_ratio" in c else ""
        yield (row["case"] if position == 0 else "", row["pass"] if position == 0 else "", f"[bold]{name}[/]" if name == "liger" else name,
               milliseconds(stats["median"]), spread(stats), milliseconds(second["median"]), ratio,
               *([cpu_ratio] if device == "cpu" else []),
               share, size(c["peak_bytes"]))


def show(results, failures, device, console):
    """Prints the tables, then what failed."""
    groups = {}
    for row in results:
        groups.setdefault((row["op"], row["heap"]), []).append(row)
    for (op, heap), rows in groups.items():
        copy = [r["copy_gb_s"] for r in rows if r.get("copy_gb_s")]
        gemm = [r["gemm_tflop_s"] for r in rows if r["gemm_tflop_s"]]
        title = f"{op} on {device}" + (f", {heap} heap" if heap else "")
        title += f"; copy {sum(copy) / len(copy):.0f} GB/s" if copy else ""
        title += f", GEMM {sum(gemm) / len(gemm):.2f} TFLOP/s" if gemm else ""
        first, second = ("wall ms", "CPU ms") if device == "cpu" else ("kernel ms", "call ms")
        table = Table("case", "pass", "", title=title, title_justify="left")
        for column in (first, "spread", second, "time / ours", *(["CPU / ours"] if device == "cpu" else []), "of copy", "peak extra"):
            table.add_column(column, justify="right")
        for row in rows:
            for cells in rows_of(row, device):
                table.add_row(*cells)
            table.add_section()
        console.print(table)
    for f in failures:
        console.print(f"[red]failed[/] {f['op']} {f['case']} {f['contender']}: {f['error']}", highlight=False)
