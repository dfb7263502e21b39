"""Alignment and distillation losses of a language model's hidden states and head, without its logits.

Names are resolved on first use: `liger_kernel.chunked_loss.LigerFusedLinearDPOLoss` imports the module that defines it. A module
says what it exports in a literal `EXPORTS`, read without importing it, so that importing this package imports nothing else."""

import ast
import functools
import importlib
import pathlib

_FOLDER = pathlib.Path(__file__).parent


@functools.cache
def _exports():
    """{public name: module}, from each module's literal `EXPORTS = [...]`."""
    table = {}
    for path in sorted(_FOLDER.glob("*.py")):
        if path.name.startswith(("_", "test_", "bench")):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXPORTS":
                table.update(dict.fromkeys(ast.literal_eval(node.value), path.stem))
    return table


def __getattr__(name):
    if name == "__all__":
        return sorted(n for n in _exports() if n.endswith("Loss"))
    if name.startswith("__"):
        raise AttributeError(name)
    if (_FOLDER / f"{name}.py").exists():
        return importlib.import_module(f"{__name__}.{name}")
    module = _exports().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(f"{__name__}.{module}"), name))


def __dir__():
    return sorted({*globals(), *_exports()})
