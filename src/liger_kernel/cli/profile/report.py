"""Table, chart and verdict of `liger profile`: one column per arm."""

from rich.markup import escape

from liger_kernel.cli.bench.report import size
from liger_kernel.cli.profile.phases import PHASES
from liger_kernel.cli.record import figure
from liger_kernel.cli.step.kinds import PARTS
from liger_kernel.cli.step.report import AGREEMENT, COLOURS, milliseconds
from liger_kernel.cli.step.report import describe as describe_model


def derive(document):
    """Adds to every arm its parts' shares, its peak and the peak above weights, gradients and optimizer states; to the document
    whether the losses agree, and the verdict."""
    for arm in document["arms"].values():
        if "parts_ms" in arm:
            whole = sum(arm["parts_ms"].values())
            arm["shares"] = {part: ms / whole if whole else 0.0 for part, ms in arm["parts_ms"].items()}
        if "peak_bytes" in arm:
            arm["peak"] = max(arm["peak_bytes"].values())
            arm["peak_above_model"] = max(0, arm["peak"] - sum(arm["state_bytes"].values()))
    losses = [arm["losses"] for arm in document["arms"].values() if "losses" in arm]
    differences = [abs(a - b) / abs(a) if a else abs(b) for other in losses[1:] for a, b in zip(losses[0], other, strict=True)]
    document["max_loss_difference"] = max((d if d == d else float("inf") for d in differences), default=0.0)  # NaN agrees with nothing
    document["losses_agree"] = document["max_loss_difference"] <= AGREEMENT[document["settings"]["dtype"]]
    document["verdict"] = verdict(document)


def describe(document):
    s = document["settings"]
    if "script" not in s:
        return describe_model(document)
    parameters = next((arm["parameters"] for arm in document["arms"].values() if "parameters" in arm), 0)
    return (f"{' '.join([document['name'], *s['arguments']])}: {s.get('model', 'no model')}, {parameters / 1e6:,.1f} M parameters, on "
            f"{document['device']}, {s.get('tokens', 0):,} tokens a step, {s.get('optimizer', 'no optimizer')}")


def percent(share):
    return f"{share * 100:.0f} %" if share >= 0.1 or share == 0 else f"{share * 100:.1f} %"


def verdict(document):
    """One sentence: speed, and whether the two arms' step times overlap; the part whose share fell most; memory."""
    arms = document["arms"]
    short = [f"{name}: {arm['status']}" for name, arm in arms.items() if arm["status"] != "ok"]
    if short:
        return "; ".join(short) + ", so there is nothing to compare"
    base, ours = arms["hf"], arms["patched"]
    gained = max(PARTS, key=lambda part: base["shares"][part] - ours["shares"][part])
    overlap = " (step times overlap)" if base["low_s"] <= ours["high_s"] and ours["low_s"] <= base["high_s"] else ""
    before, after = percent(base["shares"][gained]), percent(ours["shares"][gained])
    speed, unit = base["median_s"] / ours["median_s"], "steps"
    if base["tokens_per_s"]:
        speed, unit = ours["tokens_per_s"] / base["tokens_per_s"], "tokens"
    text = (f"patched: {speed:.2f}x the {unit}/s{overlap}; {gained} {before} -> {after} of the step; peak memory above the model "
            f"{size(base['peak_above_model'])} -> {size(ours['peak_above_model'])}")
    if not base["losses"]:
        return f"{text}; the model returned no loss, so the losses are not compared"
    return text if document["losses_agree"] else f"{text}; THE LOSSES DISAGREE by {document['max_loss_difference']:.1e}"


def rows(document):
    """[(what, one text per arm)]; rows that no arm has are left out."""
    arms = list(document["arms"].values())
    cuda = document["device"] != "cpu"

    def row(what, text):
        cells = []
        for arm in arms:
            try:
                cells.append(text(arm))
            except (KeyError, IndexError, TypeError):  # not measured; None where the device has no such thing
                cells.append("")
        return what, cells

    work = "kernel time" if cuda else "time"
    table = [
        row("tokens/s (median step)", lambda r: f"{r['tokens_per_s']:,.0f}" if r["tokens_per_s"] else "no tokens"),
        row("step", lambda r: f"{milliseconds(r['median_s'] * 1e3)} ({r['low_s'] * 1e3:.0f} to {r['high_s'] * 1e3:.0f})"),
        row("kernels", lambda r: f"{r['kernels']:,}"),
        row("launches", lambda r: f"{r['launches']:,}"),
        row("copies and fills by the driver", lambda r: f"{r['driver_copies']:,}"),
        row("operators called", lambda r: f"{r['operators']:,}"),
        row("device idle in the profiled step", lambda r: f"{milliseconds(r['idle']['idle_ms'])} of {milliseconds(r['idle']['span_ms'])}, "
            f"{r['idle']['gaps']:,} gaps, longest {r['idle']['longest_ms']:.2f} ms"),
        *(row(f"{part}, {work}", lambda r, part=part: f"{milliseconds(r['parts_ms'][part])}, {percent(r['shares'][part])}")
          for part in PARTS),
        row(f"all parts, {work}", lambda r: milliseconds(sum(r["parts_ms"].values()))),
        row("weights, gradients, optimizer", lambda r: size(sum(r["state_bytes"].values()))),
        *(row(f"peak memory, {phase}", lambda r, phase=phase: size(r["peak_bytes"][phase])) for phase in PHASES),
        row("peak memory above the model", lambda r: size(r["peak_above_model"])),
        row("last loss", lambda r: f"{r['losses'][-1]:.5f}"),
    ]
    if not cuda:
        table.insert(3, ("kernels, launches, device idle", ["n/a on the CPU"] * len(arms)))
    return [(what, cells) for what, cells in table if any(cells)]


def show(document, console):
    from rich.table import Table

    table = Table("", title=describe(document), title_justify="left")
    for name in document["arms"]:
        table.add_column(name, justify="right")
    for what, cells in rows(document):
        table.add_row(what, *cells)
    console.print(table)
    for name, arm in document["arms"].items():
        if "error" in arm:
            console.print(f"[red]{arm['status']}[/] {name}: {escape(arm['error'])}", highlight=False)


def plot(document, folder):
    """profile.png in a folder that is made: time by part, and peak memory by phase. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    arms = {name: arm for name, arm in document["arms"].items() if "parts_ms" in arm}
    fig = figure(9, 4.6)
    times, memory = fig.subplots(2, 1)
    whole = max((sum(arm["parts_ms"].values()) for arm in arms.values()), default=1.0)
    left = [0.0] * len(arms)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        widths = [arm["parts_ms"][part] for arm in arms.values()]
        drawn = times.barh(list(arms), widths, left=left, color=colour, label=part)
        shares = [percent(arm["shares"][part]) if w > 0.05 * whole else "" for w, arm in zip(widths, arms.values(), strict=True)]
        times.bar_label(drawn, shares, label_type="center", color="white", fontsize=7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    times.invert_yaxis()
    times.set(xlabel=f"{'kernel ' if document['device'] != 'cpu' else ''}milliseconds of the profiled step, and shares of it")
    unit, name = (1e9, "GB") if max((arm["peak"] for arm in arms.values()), default=0) >= 1e9 else (1e6, "MB")
    for position, (arm, numbers) in enumerate(arms.items()):
        places = [i + 0.4 * position for i in range(len(PHASES))]
        drawn = memory.bar(places, [numbers["peak_bytes"].get(p, 0) / unit for p in PHASES], width=0.38, label=arm,
                           color=("#4c72b0", "#c44e52")[position])
        memory.bar_label(drawn, fmt="%.3g", fontsize=7)
    memory.set_xticks([i + 0.2 for i in range(len(PHASES))], PHASES)
    memory.set(ylabel=f"peak memory, {name}")
    memory.margins(y=0.15)
    if arms:
        memory.legend(fontsize=7, frameon=False)
    fig.suptitle(describe(document), fontsize=7)
    fig.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    path = folder / "profile.png"
    fig.savefig(path)
    return path
