"""The kinds of results files, told apart by their keys: what a page says, in the words of the command that measured, and its pictures."""

import re
import typing

from generator import bench
from generator.text import cell, table
from liger_kernel.cli import models
from liger_kernel.cli.bench import plots as bench_plots
from liger_kernel.cli.convergence import report as convergence
from liger_kernel.cli.demo import report as demo
from liger_kernel.cli.memory import report as memory
from liger_kernel.cli.profile import report as profile
from liger_kernel.cli.step import report as step

MARKUP = re.compile(r"\[/?[a-z]*\]")  # of the terminal


class Kind(typing.NamedTuple):
    keys: tuple  # that a file of this kind has
    page: typing.Callable  # (document, {what a picture shows: address}, op -> link) -> Markdown
    pictures: typing.Callable = lambda document: {}  # document -> {what it shows: file name}
    draw: typing.Callable | None = None  # (document, folder that exists): those files


def shown(images):
    return [f"![{what}]({address})" for what, address in images.items()]


def arms_table(document, rows, first=()):
    names = document["arms"]
    return table(("", *names), [*first, *((what, *map(cell, cells)) for what, cells in rows)], "l" + "r" * len(names))


def errors(document):
    return [f"{name} {arm['status']}: {cell(arm['error'])}" for name, arm in document["arms"].items() if "error" in arm]


def step_page(document, images, link):
    verdict = f"largest relative difference {document['max_loss_difference']:.1e}."
    compared = sum("losses" in arm for arm in document["arms"].values()) > 1
    return [step.describe(document) + ".", *shown(images),
            arms_table(document, step.rows(document), [("", *(arm["status"] for arm in document["arms"].values()))]), *errors(document),
            f"{'The losses agree' if document['losses_agree'] else '**THE LOSSES DISAGREE**'}: {verdict}" if compared else ""]


def profile_page(document, images, link):
    return [profile.describe(document) + ".", f"**{document['verdict']}**", *shown(images), arms_table(document, profile.rows(document)),
            *errors(document)]


def memory_page(document, images, link):
    return [f"**{document['verdict']}**", *shown(images), *(memory.markdown(section) for section in memory.sections(document)),
            *errors(document)]


def demo_page(document, images, link):
    config, results = document["settings"], document["results"]
    return [demo.describe(config, results) + ".", f"**{document['found']['sentence']}**",
            table(("", "transformers", "liger", "ratio"), demo.rows(config, results), "lrrr"), *shown(images)]


def convergence_page(document, images, link):
    arms = [convergence.LINES[name][0] for name, arm in document["arms"].items() if arm]
    return [convergence.describe(document) + ".", f"**{convergence.compare(document)['sentence']}**",
            table(("", *arms), convergence.rows(document), "l" + "r" * len(arms)), *shown(images)]


def numerics_page(document, images, link):
    from liger_kernel.cli.numerics import report as numerics  # needs torch

    groups, lines = {}, []
    for row in document["results"]:
        groups.setdefault((row["op"], row["dtype"], row["pass"]), []).append(row)
    for (op, dtype, which), rows in groups.items():
        row = numerics.worst(rows)
        eager = row["eager"] or {}
        lines.append((link(op), dtype, which, f"{row['ours']['of_bound']:.2f}", f"{eager['of_bound']:.2f}" if eager else "",
                      f"{row['ours']['ulps']:.3g}", f"{eager['ulps']:.3g}" if eager else "", cell(f"{row['regime']}, {row['case']}")))
    head = ("op", "dtype", "", "of bound", "eager's", "ULPs", "eager's ULPs", "where")
    return [f"**{numerics.verdict(document)[1]}**", *shown(images), table(head, lines, "lllrrrrl")]


def models_page(document, images, link):
    return ["Largest differences, relative: in fp32 to the unpatched model; in bf16 to that model in fp32, and the unpatched bf16 model's "
            "own difference to it.",
            table(models.HEAD, ([cell(MARKUP.sub("", text)) for text in models.cells(row)] for row in document["models"]), "lllrrrrrr")]


def numbers_page(document, images, link):
    """Of a file of no known kind: its scalars, and a table of every list of records."""
    known = {"date", "device", "environment", "commit", "rounds", "against", "against_commit", "note"}
    scalars, parts = {}, []

    def walk(name, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name} {key}".strip(), inner)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            flat = [flatten(record) for record in value]
            keys = list(dict.fromkeys(key for record in flat for key in record))
            parts.append(f"## {name}\n\n" + table(keys, ([cell(record.get(key, "")) for key in keys] for record in flat)))
        elif not isinstance(value, list):
            scalars[name] = cell(value)

    walk("", {key: value for key, value in document.items() if key not in known})
    return [table(("", ""), scalars.items()) if scalars else "", *parts]


def flatten(record, prefix=""):
    """The scalars of a record, those of records inside it by joined names."""
    flat = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key} ")
        elif not isinstance(value, list):
            flat[prefix + key] = value
    return flat


def draw_demo(document, folder):
    demo.plot_losses(folder / "losses.png", document["results"])
    demo.plot_parts(folder / "parts.png", document["results"], "milliseconds")


def draw_numerics(document, folder):
    from liger_kernel.cli.numerics import report as numerics

    numerics.plot(document, folder)


def draw_convergence(document, folder):
    convergence.plot_loss(folder / "loss.png", document, convergence.compare(document))
    convergence.plot_steps(folder / "steps.png", document)


# The first whose keys a file has.
KINDS = {
    "bench": Kind(("results", "rounds"), lambda *given: [bench.page(*given)], bench.pictures,
                  lambda document, folder: bench_plots.write(folder, document["results"], document["device"])),
    "memory": Kind(("arms", "max_error"), memory_page,
                   lambda document: {} if document["settings"]["fit"] else {"measured and predicted": "memory.png"}, memory.plot),
    "profile": Kind(("arms", "losses_agree", "verdict"), profile_page, lambda document: {"time and memory": "profile.png"}, profile.plot),
    "step": Kind(("arms", "losses_agree"), step_page, lambda document: {"time and memory": "step.png"}, step.plot),
    "convergence": Kind(("arms", "limit"), convergence_page,
                        lambda document: {"losses": "loss.png", "gradient norm, speed, memory": "steps.png"}, draw_convergence),
    "numerics": Kind(("results", "modules"), numerics_page, lambda document: {"parts of the bounds": "numerics.png"}, draw_numerics),
    "models": Kind(("models",), models_page),
    "demo": Kind(("found", "settings"), demo_page, lambda document: {"loss": "losses.png", "time by part": "parts.png"}, draw_demo),
    "numbers": Kind((), numbers_page),
}


def kind_of(document):
    return next(name for name, kind in KINDS.items() if all(key in document for key in kind.keys))


def pictures(document):
    return KINDS[kind_of(document)].pictures(document)


def page(document, images, link):
    """The body of a document's page, without title and facts."""
    return "\n\n".join(filter(None, KINDS[kind_of(document)].page(document, images, link)))
