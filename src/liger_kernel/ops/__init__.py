"""Operators, one folder each. Names are resolved on first use: `liger_kernel.ops.LigerRMSNormFunction` imports the folder
that defines it. A folder, or a module beside the folders, says what it exports in `EXPORTS`, read without importing it (see `_exports`).
LIGER_KERNEL_IMPL is judged here, once: :mod:`liger_kernel.ops.backends.registry`."""

import ast
import functools
import importlib
import pathlib

_FOLDER = pathlib.Path(__file__).parent


@functools.cache
def _exports():
    """{public name: folder or module}, from its literal `EXPORTS = [...]`, so that listing names imports nothing."""
    table = {}
    for file in sorted([*_FOLDER.glob("*/__init__.py"), *_FOLDER.glob("[!_]*.py")]):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXPORTS":
                table.update(dict.fromkeys(ast.literal_eval(node.value), file.parent.name if file.stem == "__init__" else file.stem))
    return table


def __getattr__(name):
    if name == "__all__":
        return sorted(_exports())
    if name.startswith("__"):
        raise AttributeError(name)
    if (_FOLDER / name / "__init__.py").exists():
        return importlib.import_module(f"liger_kernel.ops.{name}")
    folder = _exports().get(name)
    if folder is None:
        raise AttributeError(f"module 'liger_kernel.ops' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"liger_kernel.ops.{folder}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(_exports()))


from liger_kernel.ops.backends.registry import load_selected  # noqa: E402, a submodule of this one

load_selected()
