"""The demo's report: a table on the terminal, two PNGs, report.json and one self-contained HTML page."""

import base64
import html
import json

from liger_kernel import env_report
from liger_kernel.cli import record
from liger_kernel.cli.demo.parts import PARTS
from liger_kernel.cli.record import figure

COLOURS = ("#4c72b0", "#dd8452", "#937860", "#55a868", "#c44e52", "#8172b3", "#b0b0b0")
# The same arithmetic in another order drifts apart slowly: a step in fp32 agrees to 1e-6, a few dozen of them to 1e-3; bf16
# weights round away 2^-9 at every step.
AGREEMENT = {"cpu": 2e-3, "cuda": 2e-2}


def compare(config, results):
    """What the two runs show: ratios, the largest relative difference of the loss, and the sentence that says it."""
    eager, ours = results["transformers"], results["liger"]
    differences = [abs(a - b) / abs(a) for a, b in zip(eager["losses"], ours["losses"], strict=True)]
    limit = AGREEMENT[config["device"].partition(":")[0]]
    speed = ours["tokens_per_s"] / eager["tokens_per_s"]
    memory = 1 - ours["peak_bytes"] / eager["peak_bytes"] if min(eager["peak_bytes"], ours["peak_bytes"]) > 0 else None
    agree = max(differences) <= limit
    curves = (f"the loss curves agree to {max(differences):.1e} at every step" if agree else
              f"THE LOSS CURVES DISAGREE by {max(differences):.1e} (limit {limit:.0e})")
    sizes = f"({megabytes(eager['peak_bytes'])} -> {megabytes(ours['peak_bytes'])})"
    saved = "no memory to speak of" if memory is None else f"{abs(memory):.0%} {'less' if memory >= 0 else 'MORE'} memory"
    rates = f"({eager['tokens_per_s']:,.0f} -> {ours['tokens_per_s']:,.0f} tokens/s)"
    sentence = (f"With the kernels the same training ran {speed:.2f}x as fast {rates} with {saved} above the model's own state {sizes}; "
                f"{curves}.")
    return {"speed": speed, "memory_saved": memory, "max_loss_difference": max(differences), "limit": limit, "curves_agree": agree,
            "sentence": sentence}


def megabytes(count):
    return f"{count / 1e9:.2f} GB" if count >= 1e10 else f"{count / 1e6:.0f} MB"


def rows(config, results):
    """[(what, transformers, liger, ratio)] as text."""
    eager, ours = results["transformers"], results["liger"]

    def row(what, key, text):
        a, b = key(eager), key(ours)
        return what, text(a), text(b), f"{b / a:.2f}" if a else ""

    def spread(r):
        return f"{r['low_s'] * 1e3:.0f} to {r['high_s'] * 1e3:.0f} ms"

    table = [row("tokens/s (median step)", lambda r: r["tokens_per_s"], lambda v: f"{v:,.0f}"),
             row("step", lambda r: r["median_s"], lambda v: f"{v * 1e3:.0f} ms"),
             ("steps range over", spread(eager), spread(ours), ""),
             row("peak memory above params, gradients, optimizer", lambda r: r["peak_bytes"], megabytes),
             row("params, gradients, optimizer", lambda r: r["state_bytes"], megabytes)]
    if config["device"] == "cpu":
        table.append(row("peak resident memory of the process", lambda r: r["peak_rss"], megabytes))
    kind = "time" if config["device"] == "cpu" else "kernel time"
    for part in PARTS:
        table.append(row(f"{part}, {kind} a step", lambda r, part=part: r["parts_ms"][part], lambda v: f"{v:.1f} ms"))
    table.append(("last loss", f"{eager['losses'][-1]:.5f}", f"{ours['losses'][-1]:.5f}", ""))
    return table


def describe(config, results):
    dtype = "fp32" if config["device"] == "cpu" else "bf16"
    return (f"Llama of {results['liger']['parameters'] / 1e6:.1f}M random weights ({config['layers']} layers, width {config['hidden']}, "
            f"vocabulary {config['vocab']}), {dtype} on {config['device']}, "
            f"{config['steps']} steps of {config['batch']} x {config['seq']} tokens, AdamW")


def show(console, config, results, found):
    from rich.table import Table

    table = Table("", title=describe(config, results), title_justify="left")
    for column in ("transformers", "liger", "ratio"):
        table.add_column(column, justify="right")
    for cells in rows(config, results):
        table.add_row(*cells)
    console.print(table)
    console.print(f"largest relative difference of the loss: {found['max_loss_difference']:.2e}", highlight=False)


def plot_losses(path, results):
    fig = figure(7, 4)
    axes = fig.add_subplot()
    steps = range(1, len(results["liger"]["losses"]) + 1)
    axes.plot(steps, results["transformers"]["losses"], color=COLOURS[0], linewidth=5, alpha=0.4, label="transformers")
    axes.plot(steps, results["liger"]["losses"], color=COLOURS[4], linewidth=1.4, label="liger")
    axes.set(xlabel="step", ylabel="loss", title="Loss, one curve on top of the other")
    axes.grid(alpha=0.3)
    axes.legend()
    fig.savefig(path)


def plot_parts(path, results, unit):
    fig = figure(8, 3.2)
    axes = fig.add_subplot()
    names = list(results)
    left = [0.0] * len(names)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        widths = [results[n]["parts_ms"][part] for n in names]
        bars = axes.barh(names, widths, left=left, color=colour, label=part)
        whole = max(sum(r["parts_ms"].values()) for r in results.values())
        axes.bar_label(bars, [f"{w:.0f}" if w > 0.04 * whole else "" for w in widths], label_type="center", color="white", fontsize=8)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel=f"{unit} a step, forward and backward", title="Where a step's time goes")
    axes.invert_yaxis()
    fig.legend(loc="outside lower center", ncols=len(PARTS), fontsize=8, frameon=False)
    fig.savefig(path)


STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}img{max-width:100%}
.found{font-size:1.15rem;padding:.8rem 1rem;background:#eef4ee;border-left:4px solid #55a868}
.bad{background:#f8eaea;border-color:#c44e52}footer{color:#666;font-size:.85rem}"""


def page(config, results, found, images):
    """The HTML text; images are (title, PNG bytes)."""
    def cell(text, tag="td"):
        return f"<{tag}>{html.escape(text)}</{tag}>"

    head = "".join(cell(t, "th") for t in ("", "transformers", "liger", "ratio"))
    body = "".join(f"<tr>{''.join(cell(c) for c in cells)}</tr>\n" for cells in rows(config, results))
    encoded = [(html.escape(title), base64.b64encode(png).decode()) for title, png in images]
    pictures = "".join(f'<img alt="{title}" src="data:image/png;base64,{png}">\n' for title, png in encoded)
    facts = "; ".join(f"{name} {value}" for name, value in env_report.facts().items())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>liger demo</title><style>{STYLE}</style>
<h1>Training with and without the kernels</h1>
<p>{html.escape(describe(config, results))}; the text is the source of Python's standard library. Both runs start
from the same weights and see the same batches, one process after the other. Times are medians without the
first {config['warmup']} steps.</p>
<p class="found{'' if found['curves_agree'] else ' bad'}">{html.escape(found['sentence'])}</p>
<table><tr>{head}</tr>
{body}</table>
{pictures}<p>Time by part is the profiler's own time of the operators, the median of five further steps; backward is
booked on the part that caused it. The fused loss makes its gradients during forward.</p>
<footer>{html.escape(facts)}</footer></html>
"""


def write(out, config, results, found):
    """loss.png, parts.png, report.json, report.html."""
    plot_losses(out / "loss.png", results)
    plot_parts(out / "parts.png", results, "milliseconds" if config["device"] == "cpu" else "kernel milliseconds")
    document = record.document(config["device"], settings=config, found=found, results=results)
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    images = [("loss curves", (out / "loss.png").read_bytes()), ("time by part", (out / "parts.png").read_bytes())]
    (out / "report.html").write_text(page(config, results, found, images), encoding="utf-8")
