"""Plots of `liger bench`: one PNG per op and heap; a row per case, a column per pass, a bar per contender."""

from liger_kernel.cli.bench import report
from liger_kernel.cli.record import figure

COLOURS = {"liger": "#c44e52", "eager": "#4c72b0", "compile": "#dd8452", "torch": "#55a868",
           "against": "#8172b3", "against eager": "#a9bcdb"}
OTHER = "#937860"


def microseconds(value):
    return f"{value:.2f} us" if value < 10 else f"{value:.1f} us" if value < 1000 else f"{value / 1e3:.2f} ms"


def floor_of(row):
    """us at the machine's measured rate: by flops where matrix products are the work, else by bytes; 0 when it is not known."""
    if row["flops"] and row["gemm_tflop_s"]:
        return row["flops"] / row["gemm_tflop_s"] / 1e6
    return row["bytes"] / row["copy_gb_s"] / 1e3 if row.get("copy_gb_s") else 0


def draw(axes, row):
    """The bars of one result, each with its time and share; a dashed line where the machine's own rate would be."""
    names = report.names_of(row)
    times = [row["contenders"][n]["us"] for n in names]
    bars = axes.barh(names, times, color=[COLOURS.get(n, OTHER) for n in names], height=0.7)
    labels = [f"{microseconds(t)}, {report.share_of(row['contenders'][n])}".removesuffix(", ") for n, t in zip(names, times, strict=True)]
    axes.bar_label(bars, labels, fontsize=7, bbox={"facecolor": "white", "linewidth": 0, "pad": 0.3}, padding=3)
    if floor_of(row):
        axes.axvline(floor_of(row), color="#333333", linewidth=0.9, linestyle="--", label="the same at the measured copy or GEMM rate")
    axes.set_xlim(0, 1.45 * max(times))
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{row['case']}, {row['pass']}", fontsize=8, loc="left")


def write(folder, results, device):
    """Draws `report.derive`d results into a folder that is made; the paths, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = {}
    for row in results:
        if row["contenders"]:
            groups.setdefault((row["op"], row["heap"]), {}).setdefault(row["case"], []).append(row)
    paths = []
    for (op, heap), cases in groups.items():
        columns = max(len(rows) for rows in cases.values())
        heights = [0.55 + 0.22 * max(len(r["contenders"]) for r in rows) for rows in cases.values()]
        fig = figure(5.2 * columns, sum(heights) + 0.7)
        grid = fig.subplots(len(cases), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
        for line, rows in zip(grid, cases.values(), strict=True):
            for axes in line[len(rows) :]:
                axes.set_axis_off()
            for axes, row in zip(line, rows, strict=False):
                draw(axes, row)
        kind = "wall time" if device == "cpu" else "kernel time"
        fig.suptitle(f"{op} on {device}" + (f", {heap} heap" if heap else "") + f": {kind} in us", fontsize=10)
        lines = [axes.get_lines()[0] for axes in grid.flat if axes.get_lines()]
        fig.legend(handles=lines[:1], loc="outside lower right", fontsize=7, frameon=False)
        paths.append(folder / (f"{op}-{heap}.png" if heap else f"{op}.png"))
        fig.savefig(paths[-1])
    return paths
