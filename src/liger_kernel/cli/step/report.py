"""Table and plot of `liger bench step`: one column per arm."""

from rich.markup import escape

from liger_kernel.cli.bench.report import size
from liger_kernel.cli.record import figure
from liger_kernel.cli.step.kinds import PARTS

COLOURS = ("#4c72b0", "#dd8452", "#937860", "#55a868", "#8c8c8c", "#c44e52", "#8172b3", "#ccb974", "#d0d0d0")
# Another order of the same arithmetic: fp32 agrees to 1e-6 at a step, bf16 weights round away 2^-9 at every one.
AGREEMENT = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 2e-2}


def derive(document):
    """Adds every arm's speed and memory over the first arm that finished, and whether all losses agree."""
    done = {name: result for name, result in document["arms"].items() if "median_s" in result}
    first = next(iter(done.values()), None)
    worst = 0.0
    for result in done.values():
        result["speed_over_first"] = result["tokens_per_s"] / first["tokens_per_s"]
        result["above_state_over_first"] = result["peak_above_state"] / first["peak_above_state"] if first["peak_above_state"] else None
        differences = [abs(a - b) / abs(a) for a, b in zip(first["losses"], result["losses"], strict=True)]
        result["max_loss_difference"] = max(differences)
        worst = max(worst, *(d if d == d else float("inf") for d in differences))  # NaN agrees with nothing
    document["max_loss_difference"] = worst
    document["losses_agree"] = worst <= AGREEMENT[document["settings"]["dtype"]]


def milliseconds(value):
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def rows(document):
    """[(what, one text per arm)]; a row that no arm has is left out."""
    arms = document["arms"].values()
    cuda = document["device"] != "cpu"
    first = next((r for r in arms if "median_s" in r), {})

    def row(what, value, text, ratio=True):
        """`value` of every arm, with the ratio to the first arm's; KeyError and None leave the cell empty."""
        cells = []
        for result in arms:
            try:
                number, base = value(result), value(first) if ratio and result is not first else None
            except KeyError:
                number = base = None
            times = f" ({number / base:.2f}x)" if number is not None and base else ""
            cells.append("" if number is None else text(number) + times)
        return what, cells

    work = "kernel time" if cuda else "time"
    table = [
        row("tokens/s (median step)", lambda r: r["tokens_per_s"], "{:,.0f}".format),
        row("step", lambda r: r["median_s"] * 1e3, milliseconds),
        ("steps range over", [f"{r['low_s'] * 1e3:.0f} to {r['high_s'] * 1e3:.0f} ms" if "low_s" in r else "" for r in arms]),
        row("first step, with what compiles", lambda r: r["first_s"], "{:.1f} s".format, ratio=False),
        row("peak memory allocated", lambda r: r["peak_allocated"], size),
        row("peak memory reserved" if cuda else "peak resident memory of the process", lambda r: r["peak_reserved"], size),
        row("weights, gradients, optimizer", lambda r: sum(r["state_bytes"].values()), size, ratio=False),
        row("peak above these", lambda r: r["peak_above_state"], size),
        row("kernel launches a step", lambda r: r["kernels"], "{:,}".format),
        row("copies and fills by the driver", lambda r: r["driver_copies"], "{:,}".format),
        *(row(f"{part}, {work}", lambda r, part=part: r["parts_ms"][part], milliseconds) for part in PARTS),
        row(f"all, {work} of the profiled step", lambda r: sum(r["parts_ms"].values()), milliseconds),
        row("first loss", lambda r: r["losses"][0], "{:.5f}".format, ratio=False),
        row("last loss", lambda r: r["losses"][-1], "{:.5f}".format, ratio=False),
    ]
    return [(what, cells) for what, cells in table if any(cells)]


def describe(document):
    s = document["settings"]
    parameters = next((r["parameters"] for r in document["arms"].values() if "parameters" in r), 0)
    return (f"{document['name']}: {parameters / 1e9:.3f} G random weights, {s['model'].get('num_hidden_layers', '?')} layers, "
            f"{s['dtype']} on {document['device']}, {s['batch']} x {s['seq']} tokens a step, {s['attention']} attention, "
            f"{'with' if s['checkpointing'] else 'without'} gradient checkpointing, fused AdamW")


def show(document, console):
    from rich.table import Table

    table = Table("", title=describe(document), title_justify="left")
    for name in document["arms"]:
        table.add_column(name, justify="right")
    table.add_row("", *(r["status"] if r["status"] == "ok" else f"[red]{r['status']}[/]" for r in document["arms"].values()))
    for what, cells in rows(document):
        table.add_row(what, *cells)
    console.print(table)
    named = [name for name, result in document["arms"].items() if result.get("parts_from") == "names"]
    if named:
        console.print(f"{', '.join(named)}: parts by the names of the kernels; one that fuses two parts counts for one", highlight=False)
    for name, result in document["arms"].items():
        if "error" in result:
            console.print(f"[red]{result['status']}[/] {name}: {escape(result['error'])}", highlight=False)
    if sum("losses" in r for r in document["arms"].values()) > 1:
        verdict = "the losses agree" if document["losses_agree"] else "[red]THE LOSSES DISAGREE[/]"
        console.print(f"{verdict}: largest relative difference {document['max_loss_difference']:.1e}", highlight=False)


def plot(document, folder):
    """step.png in a folder that is made: time by part and memory, one bar per arm that has them. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    arms = {name: r for name, r in document["arms"].items() if "parts_ms" in r}
    fig = figure(9, 2.3 + 0.7 * max(1, len(arms)))
    times, memory = fig.subplots(2, 1)
    whole = max((sum(r["parts_ms"].values()) for r in arms.values()), default=1.0)
    left = [0.0] * len(arms)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        widths = [r["parts_ms"][part] for r in arms.values()]
        bars = times.barh(list(arms), widths, left=left, color=colour, label=part)
        times.bar_label(bars, [f"{w:.0f}" if w > 0.04 * whole else "" for w in widths], label_type="center", color="white", fontsize=7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    times.set(xlabel=f"{'kernel ' if document['device'] != 'cpu' else ''}milliseconds of the profiled step")
    state = [sum(r["state_bytes"].values()) / 1e9 for r in arms.values()]
    above = [r["peak_above_state"] / 1e9 for r in arms.values()]
    memory.barh(list(arms), state, color="#b0b0b0", label="weights, gradients, optimizer")
    bars = memory.barh(list(arms), above, left=state, color="#c44e52", label="above these")
    memory.bar_label(bars, [f" {r['tokens_per_s']:,.0f} tokens/s" for r in arms.values()], fontsize=8)
    memory.set(xlabel="peak memory allocated, GB")
    memory.margins(x=0.2)
    memory.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=7, frameon=False)
    for axes in (times, memory):
        axes.invert_yaxis()
    fig.suptitle(describe(document), fontsize=7)
    fig.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    path = folder / "step.png"
    fig.savefig(path)
    return path
