"""Tables, plot and verdict of `liger memory`. A section is (title, column heads, rows of texts): one form for terminal and page."""

from rich.markup import escape

from liger_kernel.cli.bench.report import size
from liger_kernel.cli.memory import formulas
from liger_kernel.cli.memory.formulas import ARMS
from liger_kernel.cli.record import figure
from liger_kernel.cli.step.configs import PRESETS

PREDICTED = (("llama3-8b", None), ("qwen2-0.5b", None), ("qwen2-7b", None), ("llama3-8b", 1 << 18), ("llama3-8b", 1 << 20))
COLOURS = {"hf": "#4c72b0", "patched": "#c44e52"}


def prediction(settings, arm, vocab, batch, seq):
    """formulas.predict at a run's settings, or None for a model that the formulae do not describe."""
    try:
        shape = formulas.Shape.of(settings["model"] | {"vocab_size": vocab})
    except ValueError:
        return None
    return formulas.predict(shape, arm, batch, seq, settings["dtype"], settings["checkpointing"],
                            settings["device"].partition(":")[0], settings.get("native", True))


def derive(document):
    """Adds to every point its prediction and, where it was measured, `peak`, `peak_above_model` (weights, gradients and optimizer
    states) and `prediction_error`: predicted less measured peak, as a share of what the step adds to weights and optimizer states."""
    errors = []
    for name, arm in document["arms"].items():
        for point in arm["points"]:
            point["predicted"] = prediction(document["settings"], name, point["vocab"], point["batch"], point["seq"])
            if "peak_bytes" in point:
                state = point["state_bytes"]
                point["peak"] = max(point["peak_bytes"].values())
                point["peak_above_model"] = max(0, point["peak"] - sum(state.values()))
                if point["predicted"]:
                    added = point["peak"] - state["weights"] - state["optimizer"]
                    point["prediction_error"] = (point["predicted"]["peak"] - point["peak"]) / added
                    errors.append(abs(point["prediction_error"]))
    document["max_error"] = max(errors, default=None)
    document["verdict"] = verdict(document)


def base(document, arm):
    """The arm's point at the size that was asked for, or {}."""
    s = document["settings"]
    wanted = (s["model"]["vocab_size"], s["batch"], s["seq"])
    return next((p for p in document["arms"][arm]["points"] if (p["vocab"], p["batch"], p["seq"]) == wanted), {})


def verdict(document):
    """One sentence: what fits, or the memory at the size that was asked for and at the largest vocabulary; the prediction's error."""
    settings, arms = document["settings"], document["arms"]
    if settings["fit"]:
        found = [arms[arm].get("fit", {"largest": 0}) for arm in ARMS]
        texts = [f"{'at least ' if fit.get('capped') or arms[arm]['status'] != 'ok' else ''}{fit['largest']:,}"
                 for arm, fit in zip(ARMS, found, strict=True)]
        times = f" ({found[1]['largest'] / found[0]['largest']:.1f}x)" if found[0]["largest"] else ""
        limit = next((f" in {size(fit['limit'])}" for fit in found if fit.get("limit")), "")
        return f"patched: largest {settings['fit']}{limit} {texts[0]} -> {texts[1]}{times}"
    short = [f"{name}: {arm['status']}" for name, arm in arms.items() if arm["status"] != "ok"]
    if short:
        return "; ".join(short) + ", so there is nothing to compare"

    def change(points):
        texts = [size(p["peak_above_model"]) if "peak" in p else p.get("status", "not measured") for p in points]
        return " -> ".join(texts)

    largest = max((p["vocab"] for p in arms["hf"]["points"]), default=0)
    points = [base(document, arm) for arm in ARMS]
    text = f"patched: peak memory above the model {change(points)} at {settings['batch']} x {settings['seq']} tokens"
    if points[0] and largest > points[0]["vocab"]:
        at = [next((p for p in arms[arm]["points"] if p["vocab"] == largest), {}) for arm in ARMS]
        text += f", {change(at)} at a vocabulary of {largest:,}"
    if document["max_error"] is not None:
        text += f"; predictions within {document['max_error']:.1%} of what a step adds"
    return text


def points_section(document):
    rows = []
    for name, arm in document["arms"].items():
        for p in sorted(arm["points"], key=lambda p: (p["vocab"], p["seq"])):
            predicted = p["predicted"] or {}
            rows.append((name, f"{p['vocab']:,}", f"{p['batch']} x {p['seq']}", size(p["peak"]) if "peak" in p else p["status"],
                         size(predicted["peak"]) if predicted else "no formula",
                         f"{p['prediction_error']:+.1%}" if "prediction_error" in p else "",
                         size(p["peak_above_model"]) if "peak" in p else "",
                         size(predicted["peak_above_model"]) if predicted else ""))
    s = document["settings"]
    title = (f"{document['name']}, {s['model'].get('num_hidden_layers', '?')} layers, {s['dtype']} on {document['device']}, "
             f"{'with' if s['checkpointing'] else 'without'} gradient checkpointing, fused AdamW: peak memory of a step. The error is a "
             f"share of what the step adds to weights and optimizer states; the model is weights, gradients and optimizer states")
    return title, ("arm", "vocabulary", "tokens", "peak", "predicted", "error", "above the model", "predicted"), rows


def parts_section(document):
    """The size that was asked for: the prediction's terms, and the phases beside what was measured."""
    points = {arm: base(document, arm) for arm in ARMS}
    predicted = {arm: p.get("predicted") for arm, p in points.items()}
    if not all(predicted.values()):
        return None
    terms = [("weights", "weights"), ("gradients", "gradients"), ("optimizer states", "optimizer"),
             ("activations kept at the end of forward", "kept"), ("one layer's backward", "layer")]
    rows = [(what, "", *(size(predicted[arm][key]) for arm in ARMS)) for what, key in terms]
    for arm in ARMS:
        for what, count in predicted[arm]["loss"].items():
            label = f"logits: {what}" if arm == "hf" else f"fused loss: {what}"
            rows.append((label, "", *(size(count) if arm == other else "" for other in ARMS)))
    for phase in predicted["hf"]["phases"]:
        rows.append((f"peak, {phase}", "predicted", *(size(predicted[arm]["phases"][phase]) for arm in ARMS)))
        if any("peak_bytes" in p for p in points.values()):
            rows.append(("", "measured", *(size(points[arm]["peak_bytes"][phase]) if phase in points[arm].get("peak_bytes", {}) else ""
                                           for arm in ARMS)))
    p = points["hf"]
    return f"What they consist of at V = {p['vocab']:,}, {p['batch']} x {p['seq']} tokens", ("", "", *ARMS), rows


def saved_sections(document):
    for name, arm in document["arms"].items():
        saved = arm.get("saved")
        if saved and saved["ops"]:
            tokens = saved["batch"] * saved["seq"]
            rows = [(op["op"], f"{op['tensors']}", size(op["bytes"]), f"{op['bytes'] / tokens:,.0f}") for op in saved["ops"]]
            whole = sum(op["bytes"] for op in saved["ops"])
            rows.append(("all", str(sum(op["tensors"] for op in saved["ops"])), size(whole), f"{whole / tokens:,.0f}"))
            title = (f"{name}: what each op saves for backward, without gradient checkpointing, V = {saved['vocab']:,}, "
                     f"{saved['batch']} x {saved['seq']} tokens; a tensor counts for the first op that saves it")
            yield title, ("op", "tensors", "bytes", "bytes a token"), rows


def predicted_section(batch, seq, checkpointing):
    """Sizes that do not fit everywhere, by formula only."""
    rows = []
    for name, vocab in PREDICTED:
        entries = PRESETS[name] | ({"vocab_size": vocab} if vocab else {})
        shape = formulas.Shape.of(entries)
        for arm in ARMS:
            p = formulas.predict(shape, arm, batch, seq, "bfloat16", checkpointing, "cuda")
            loss = sum(p["loss"].values()) if arm == "hf" else p["loss"]["dx"] + p["loss"]["dw sum"] + max(
                p["loss"]["scratch"], p["loss"]["dw"])
            rows.append((name, f"{shape.vocab:,}", arm, *(size(p[key]) for key in ("weights", "gradients", "optimizer", "kept", "layer")),
                         size(loss), size(p["peak"]), size(p["peak_above_model"])))
    heads = ("model", "vocabulary", "arm", "weights", "gradients", "optimizer", "activations kept", "layer's backward",
             "logits or fused loss", "peak", "above the model")
    return (f"Predicted for CUDA: bfloat16, {batch} x {seq} tokens, {'with' if checkpointing else 'without'} gradient checkpointing",
            heads, rows)


def fit_section(document):
    rows = []
    for name, arm in document["arms"].items():
        fit = arm.get("fit")
        if fit:
            tried = ", ".join(f"{attempt['n']}{'' if attempt['fits'] else ' (no)'}" for attempt in arm.get("tries", ()))
            rows.append((name, f"{fit['largest']:,}", "" if fit["predicted"] is None else f"{fit['predicted']:,}", size(fit["limit"] or 0),
                         tried))
    s = document["settings"]
    other = f"sequences of {s['seq']}" if s["fit"] == "batch" else f"batch {s['batch']}"
    title = (f"{document['name']}, {s['dtype']} on {document['device']}, {'with' if s['checkpointing'] else 'without'} gradient "
             f"checkpointing, V = {s['model']['vocab_size']:,}, {other}: the largest {s['fit']} that fits")
    return title, ("arm", f"largest {s['fit']}", "predicted", "limit", "tried"), rows


def sections(document):
    if document["settings"]["fit"]:
        return [fit_section(document)]
    found = [points_section(document), parts_section(document), *saved_sections(document)]
    settings = document["settings"]
    big = (settings["batch"], settings["seq"]) if document["device"] != "cpu" else (4, 4096)
    return [section for section in found if section] + [predicted_section(*big, settings["checkpointing"])]


def print_section(section, console):
    from rich.table import Table

    title, heads, rows = section
    table = Table(title=title, title_justify="left")
    for position, head in enumerate(heads):
        table.add_column(head, justify="left" if position == 0 or head == "tried" else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def show(document, sections, console):
    for section in sections:
        print_section(section, console)
    for name, arm in document["arms"].items():
        if "error" in arm:
            console.print(f"[red]{arm['status']}[/] {name}: {escape(arm['error'])}", highlight=False)


def markdown(section):
    """A section as a Markdown table, for documentation."""
    title, heads, rows = section
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return f"{title}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plot(document, folder):
    """memory.png in a folder that is made: peak above the model against vocabulary and sequence; points measured, lines predicted."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = document["settings"]
    vocab, batch, seq = settings["model"]["vocab_size"], settings["batch"], settings["seq"]
    measured = [p["peak"] for arm in document["arms"].values() for p in arm["points"] if "peak" in p]
    unit, name = (1e9, "GB") if max(measured, default=0) >= 1e9 else (1e6, "MB")
    fig = figure(10, 4)
    for axes, key, own in zip(fig.subplots(1, 2), ("vocab", "seq"), (vocab, seq), strict=True):
        other = {"vocab": ("seq", seq), "seq": ("vocab", vocab)}[key]
        values = sorted({p[key] for arm in document["arms"].values() for p in arm["points"] if p[other[0]] == other[1]} | {own})
        grid = [round(values[0] * (values[-1] / values[0]) ** (i / 60)) for i in range(61)]
        for arm, results in document["arms"].items():
            at = [{"vocab": vocab, "batch": batch, "seq": seq} | {key: n} for n in grid]
            curve = [prediction(settings, arm, **one) for one in at]
            if all(curve):
                axes.plot(grid, [c["peak"] / unit for c in curve], color=COLOURS[arm], linewidth=1.2, label=f"{arm}, predicted")
            points = sorted((p[key], p["peak"] / unit) for p in results["points"] if "peak" in p and p[other[0]] == other[1])
            axes.plot([x for x, _ in points], [y for _, y in points], "o", color=COLOURS[arm], markersize=5, label=f"{arm}, measured")
            for p in results["points"]:
                if "peak" not in p and p[other[0]] == other[1]:
                    axes.axvline(p[key], color=COLOURS[arm], linewidth=0.8, linestyle=":", label=f"{arm}, out of memory")
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{v:,}" for v in values], fontsize=7, rotation=30)
        axes.minorticks_off()
        axes.set_yscale("log")
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which("{x:g}")
        axes.tick_params(axis="y", which="both", labelsize=7)
        axes.set(xlabel={"vocab": f"vocabulary, {batch} x {seq} tokens", "seq": f"tokens a sequence, V = {vocab:,}, batch {batch}"}[key],
                 ylabel=f"peak memory of a step, {name}")
        axes.grid(alpha=0.3, which="both")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    fig.suptitle(f"{document['name']}, {settings['dtype']} on {document['device']}, "
                 f"{'with' if settings['checkpointing'] else 'without'} gradient checkpointing", fontsize=9)
    path = folder / "memory.png"
    fig.savefig(path)
    return path
