"""Pages made from the package's own tables: the models' rows, the commands' options, an op's exports."""

import ast
import importlib.metadata

from generator import ROOT
from generator.text import table


def exports(folder):
    """The literal list EXPORTS of an op folder."""
    for node in ast.parse((folder / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXPORTS":
            return ast.literal_eval(node.value)
    return []


def code(names):
    return ", ".join(f"`{name}`" for name in names)


def models():
    """The page of the model table: a line per row of `liger_kernel.patch.models`, then every class and function it replaces."""
    from liger_kernel.patch.models import rows

    try:
        which = f" of version {importlib.metadata.version('transformers')}"
    except importlib.metadata.PackageNotFoundError:
        which = ", which was not installed"
    lines, parts = [], []
    for name, row in rows().items():
        on = [option for option, default in row.parameters if default is True]
        off = [option for option, default in row.parameters if default is False]
        lines.append((f"[{name}](#{name})", code(row.types), code(on), code(off), ", ".join(f"[{part}](#{part})" for part in row.parts)))
        replaced = [(code([c]), code([spec.replacement.name]), code([row.flag_of(spec)])) for c, spec in row.layers.items()]
        replaced += [(code([function]), code([spec.name]), code(["rope"])) for function, spec in row.ropes.items()]
        replaced += [(code([c]), f"its forward: `{spec.file}.{spec.function}`", code(["fused_linear_cross_entropy"]))
                     for c, spec in row.heads.items()]
        parts.append("\n\n".join(filter(None, [
            f"## {name}", f"`apply_liger_kernel_to_{name}()` patches `{row.module}`.",
            table(("in transformers", "here", "option"), replaced) if replaced else "",
            "\n".join(f"* Left as it is: `{what}`, {why}." for what, why in row.left.items())])))
    return "\n\n".join([
        "# Models", f"`apply_liger_kernel_to_<model>()` for {len(lines)} models, as the tables of `liger_kernel.patch.models` have them. "
        "`liger models` patches a tiny model of each and prints what was replaced and how far the numbers move. Some rows "
        f"depend on transformers{which} where this page was made.",
        table(("model", "further `model_type`s", "on by default", "off by default", "and the parts of"), lines), *parts]) + "\n"


def commands():
    """The page of the `liger` command: every command's help and options, as `--help` prints them."""
    import typer.main

    from liger_kernel.cli.app import app

    parts = ["# The liger command"]

    def walk(command, path):
        inner = getattr(command, "commands", None)
        if inner is None or path != "liger":
            parts.append(f"## {path}\n\n{command.help}")
        if inner is not None:
            for name, each in inner.items():
                walk(each, f"{path} {name}")
            return
        lines = []
        for parameter in command.params:
            options = [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else [parameter.name.upper()]
            default = parameter.default
            shown = "" if default in (None, "") or callable(default) or "Sentinel" in type(default).__name__ else f"`{default}`"
            lines.append((" ".join(f"`{o}`" for o in options), (getattr(parameter, "help", None) or "").replace("|", "\\|"), shown))
        if lines:
            parts.append(table(("option", "", "default"), lines))

    walk(typer.main.get_command(app), "liger")
    return "\n\n".join(parts) + "\n"


LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".cu": "cuda", ".txt": "cmake"}


def sources(folder):
    """The files of a folder of examples as blocks of code."""
    paths = sorted(p for p in (ROOT / folder).iterdir() if p.suffix in LANGUAGES)
    return "\n\n".join(f"## {p.relative_to(ROOT).as_posix()}\n\n```{LANGUAGES[p.suffix]}\n{p.read_text().rstrip()}\n```" for p in paths)
