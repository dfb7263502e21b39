"""Tables of `liger bench`: one per op and heap, one section per shape and pass."""

from rich.table import Table

ORDER = ("liger", "eager", "compile", "torch")


def time_key(device):
    return "wall_ms" if device == "cpu" else "kernel_ms"


def derive(results, device):
    """Adds to every contender its ratio to "liger" and its share of the measured copy bandwidth or GEMM rate."""
    key = time_key(device)
    for row in results:
        ours = row["contenders"].get("liger")
        for contender in row["contenders"].values():
            seconds = contender[key]["median"] / 1e3
            if ours and "ratio" not in contender:
                contender["ratio"] = contender[key]["median"] / ours[key]["median"]
                if "cpu_ms" in ours and ours["cpu_ms"]["median"]:
                    contender["cpu_ratio"] = contender["cpu_ms"]["median"] / ours["cpu_ms"]["median"]
            if row["flops"] and row["gemm_tflop_s"]:
                contender["share_of_gemm"] = row["flops"] / seconds / 1e12 / row["gemm_tflop_s"]
            if row["bytes"]:
                contender["share_of_copy"] = row["bytes"] / seconds / 1e9 / row["copy_gb_s"]


def milliseconds(value):
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def spread(stats):
    return f"±{(stats['high'] - stats['low']) / 2 / stats['median'] * 100:.0f} %" if stats["median"] else ""


def size(count):
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def rows_of(row, device):
    """Table rows of one result."""
    names = [n for n in ORDER if n in row["contenders"]] + sorted(set(row["contenders"]) - set(ORDER))
    for position, name in enumerate(names):
        c = row["contenders"][name]
        stats = c[time_key(device)]
        second = c["cpu_ms"] if device == "cpu" else c["wall_ms"]
        share = f"{c['share_of_copy']:.0%}" if "share_of_copy" in c else ""
        share = f"{c['share_of_gemm']:.0%} GEMM" if "share_of_gemm" in c else share
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
        copy = sum(r["copy_gb_s"] for r in rows) / len(rows)
        gemm = [r["gemm_tflop_s"] for r in rows if r["gemm_tflop_s"]]
        title = f"{op} on {device}" + (f", {heap} heap" if heap else "") + f"; copy {copy:.0f} GB/s"
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
