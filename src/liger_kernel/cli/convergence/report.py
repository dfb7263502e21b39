"""What two logs show: the difference of their losses beside that of two seeds; tables, PNGs, JSON and one self-contained HTML page."""

import base64
import html
import json
import math
import statistics

from liger_kernel import env_report
from liger_kernel.cli.demo.report import COLOURS, STYLE, megabytes
from liger_kernel.cli.record import figure

LINES = {"baseline": ("without the kernels", COLOURS[0]), "liger": ("with the kernels", COLOURS[4]),
         "spread": ("without, another seed", COLOURS[1])}
LEAST = 1e-3  # nats; a hundredth of it is about the rounding of fp32 logits, beside which a smaller loss is nothing to measure by


def smoothed(values, window):
    """Means over the last `window` values, of those that have so many before them."""
    sums, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        if i >= window - 1:
            sums.append(sum(values[i - window + 1 : i + 1]) / window if not math.isfinite(total) else total / window)
    return sums


def _relative(a, b):
    return [abs(x - y) / max(abs(x), LEAST) if math.isfinite(x) and math.isfinite(y) else (0.0 if x == y else math.inf)
            for x, y in zip(a, b, strict=True)]


def distance(one, other, window):
    """How far a log's loss is from another's at the steps of both, relative: raw and smoothed, whole curves and largest values.

    Of fewer steps than `window` there is nothing smoothed, of none nothing at all: None.
    """
    place = {step: i for i, step in enumerate(one.get("step", []))}
    pairs = [(place[step], j) for j, step in enumerate(other.get("step", [])) if step in place]
    steps = [one["step"][i] for i, _ in pairs]
    a, b = [one["loss"][i] for i, _ in pairs], [other["loss"][j] for _, j in pairs]
    raw, smooth = _relative(a, b), _relative(smoothed(a, window), smoothed(b, window))
    found = {"steps": steps, "raw": raw, "smooth": smooth, "smooth_steps": steps[window - 1 :]}
    for name in ("raw", "smooth"):
        curve, at = found[name], found["steps" if name == "raw" else "smooth_steps"]
        largest = max(range(len(curve)), key=curve.__getitem__) if curve else None
        found[f"largest_{name}"] = None if largest is None else curve[largest]
        found[f"largest_{name}_step"] = None if largest is None else at[largest]
        found[f"mean_{name}"] = statistics.fmean(curve) if curve else None
    return found


def compare(document):
    """What the arms show, without the curves: sizes, verdict and the sentence that says it."""
    arms, config, limit = document["arms"], document["settings"], document["limit"]
    steps = len(set(arms["baseline"].get("step", [])) & set(arms["liger"].get("step", [])))
    window = max(1, min(50, steps // 10))
    each = {name: distance(arms["baseline"], arms[name], window) for name in arms if name != "baseline"}
    ours, spread = each["liger"], each.get("spread")
    found = {"steps": steps, "window": window, "last_step": ours["steps"][-1] if steps else 0,
             "differences": {name: {k: v for k, v in d.items() if not isinstance(v, list)} for name, d in each.items()},
             "steps_over_limit": sum(v > limit for v in ours["raw"])}
    found["tokens"] = found["last_step"] * config["batch"] * config["seq"]
    found["complete"] = found["last_step"] >= config["steps"]
    found["passes"] = bool(steps) and ours["largest_smooth"] <= limit
    if not steps:
        return found | {"sentence": "FAIL: no step was logged by both arms."}
    who = "a second run without the kernels" if config.get("control") else "the run with the kernels"
    verdict = "PASS" if found["passes"] else "FAIL"
    text = (f"{verdict}: over {found['tokens']:,} tokens the loss of {who} differs by at most {ours['largest_smooth']:.2g} relative "
            f"(smoothed over {window} logged steps; limit {limit:g}), {ours['largest_raw']:.2g} at any single step")
    if found["steps_over_limit"]:
        text += f" ({found['steps_over_limit']:,} of {steps:,} over the limit)"
    if spread and spread["steps"]:
        over = spread["steps"][-1] * config["batch"] * config["seq"]
        text += f"; another seed's{'' if over >= found['tokens'] else f', over {over:,},'} by "
        text += f"{spread['largest_raw']:.2g} at any single step" if spread["largest_smooth"] is None else (
            f"{spread['largest_smooth']:.2g} and {spread['largest_raw']:.2g}")
    if not found["complete"]:
        whole = config["steps"] * config["batch"] * config["seq"]
        text += f"; not finished: {found['tokens']:,} of {whole:,} tokens, "
        text += "without checkpoints the same command begins again" if config.get("checkpoint") == "none" else "the same command goes on"
    return found | {"sentence": text + "."}


def rows(document):
    """[(what, one text an arm)]."""
    arms = [a for a in document["arms"].values() if a]

    def rate(arm):  # the first step of a process compiles and warms up
        return statistics.median(arm["tokens_per_s"])

    def tail(values):
        return statistics.fmean(values[-max(1, min(50, len(values) // 10)) :])

    texts = (("logged steps", lambda a: f"{len(a['step']):,}"), ("tokens", lambda a: f"{a['tokens'][-1]:,}"),
             ("loss at the end, smoothed", lambda a: f"{tail(a['loss']):.5f}"),
             ("gradient norm at the end, smoothed", lambda a: f"{tail(a['grad_norm']):.4f}"),
             ("tokens/s, median step", lambda a: f"{rate(a):,.0f}"), ("peak memory", lambda a: megabytes(max(a["memory_bytes"]))))
    return [(what, *(text(a) for a in arms)) for what, text in texts]


def describe(document):
    config, count = document["settings"], document["parameters"]
    size = f" of {count / 1e6:.1f}M parameters" if count else ""
    return (f"{config['name']}{size}, {'fp32 weights under bf16 autocast' if config['precision'] == 'bf16' else 'fp32'} on "
            f"{document['device']}, {config['steps']:,} steps of {config['batch']} x {config['seq']} tokens ({document['data']}), AdamW")


def show(document, found, console):
    from rich.table import Table

    table = Table("", title=describe(document), title_justify="left")
    for name, arm in document["arms"].items():
        if arm:
            again = name == "liger" and document["settings"].get("control")
            table.add_column("without, again" if again else LINES[name][0], justify="right")
    for cells in rows(document):
        table.add_row(*cells)
    console.print(table)
    for name, one in found["differences"].items():
        smooth = "" if one["largest_smooth"] is None else f"smoothed {one['largest_smooth']:.2e} (step {one['largest_smooth_step']}), "
        if one["largest_raw"] is not None:
            console.print(f"loss, {LINES[name][0]}: relative difference at most {one['largest_raw']:.2e} (step {one['largest_raw_step']}), "
                          f"{smooth}mean {one['mean_raw']:.2e}", highlight=False)


def plot_loss(path, document, found):
    fig = figure(9, 7)
    top, bottom = fig.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    window, count = found["window"], document["settings"]["batch"] * document["settings"]["seq"]
    for name, arm in document["arms"].items():
        if arm:
            label, colour = LINES[name]
            tokens, loss = arm["tokens"][window - 1 :], smoothed(arm["loss"], window)
            top.plot(tokens, loss, color=colour, label=label, linewidth=4 if name == "baseline" else 1.4,
                     alpha=0.4 if name == "baseline" else 1)
    for name in ("spread", "liger"):
        if name in document["arms"] and document["arms"][name]:
            one = distance(document["arms"]["baseline"], document["arms"][name], window)
            label, colour = LINES[name]
            bottom.plot([s * count for s in one["steps"]], one["raw"], color=colour, alpha=0.25, linewidth=0.7)
            bottom.plot([s * count for s in one["smooth_steps"]], one["smooth"], color=colour, linewidth=1.4, label=label)
    bottom.axhline(document["limit"], color="#222222", linestyle="--", linewidth=1, label="limit")
    bottom.set_yscale("symlog", linthresh=1e-8)
    bottom.set(xlabel="tokens", ylabel="relative difference of the loss")
    bottom.set_ylim(bottom=0)
    top.set(ylabel="loss", title=f"Loss, mean of {window} logged steps, and its difference to the first run (pale: single steps)")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    fig.savefig(path)


def plot_steps(path, document):
    fig = figure(9, 6)
    axes = fig.subplots(3, 1, sharex=True)
    for name, arm in document["arms"].items():
        if arm:
            label, colour = LINES[name]
            for place, (key, scale) in zip(axes, (("grad_norm", 1), ("tokens_per_s", 1), ("memory_bytes", 1e9)), strict=True):
                place.plot(arm["tokens"], [v / scale for v in arm[key]], color=colour, linewidth=1, label=label)
    for place, label in zip(axes, ("gradient norm", "tokens/s", "peak memory, GB"), strict=True):
        place.set_ylabel(label)
        place.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=8)
    axes[-1].set_xlabel("tokens")
    fig.savefig(path)


def page(document, found, images):
    """The HTML text; images are (title, PNG bytes)."""
    def cell(text, tag="td"):
        return f"<{tag}>{html.escape(text)}</{tag}>"

    arms = [name for name, arm in document["arms"].items() if arm]
    head = "".join(cell(t, "th") for t in ("", *(LINES[name][0] for name in arms)))
    body = "".join(f"<tr>{''.join(cell(c) for c in cells)}</tr>\n" for cells in rows(document))
    pictures = "".join(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">\n'
                       for title, png in images)
    replaced = "".join(f"<pre>{html.escape(text)}</pre>" for text in document.get("patched", {}).values())
    facts = "; ".join(f"{name} {value}" for name, value in document.get("environment", env_report.facts()).items())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>liger convergence</title><style>{STYLE}</style>
<h1>Training with and without the kernels</h1>
<p>{html.escape(describe(document))}. Both runs start from the same weights and see the same batches.</p>
<p class="found{'' if found['passes'] else ' bad'}">{html.escape(found['sentence'])}</p>
<table><tr>{head}</tr>
{body}</table>
{pictures}{replaced}<footer>{html.escape(f"{facts}; commit {document.get('commit')}; {document.get('date')}")}</footer></html>
"""


def write(out, document, found):
    """loss.png, steps.png, report.json and report.html in `out`; the last two's paths."""
    out.mkdir(parents=True, exist_ok=True)
    plot_loss(out / "loss.png", document, found)
    plot_steps(out / "steps.png", document)
    (out / "report.json").write_text(json.dumps(document) + "\n")
    images = [("loss", (out / "loss.png").read_bytes()), ("gradient norm, speed, memory", (out / "steps.png").read_bytes())]
    (out / "report.html").write_text(page(document, found, images), encoding="utf-8")
    return out / "report.json", out / "report.html"
