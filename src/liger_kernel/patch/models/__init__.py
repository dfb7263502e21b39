"""The tables: every module in this folder holds rows in `MODELS`. Reading them imports neither torch nor transformers."""

import functools
import importlib
import pkgutil


@functools.cache
def rows():
    """{name: Model} of every table."""
    table = {}
    for found in pkgutil.iter_modules(__path__):
        for row in importlib.import_module(f"{__name__}.{found.name}").MODELS:
            assert row.name not in table, f"two rows are named {row.name!r}"
            table[row.name] = row
    return dict(sorted(table.items()))


@functools.cache
def by_type():
    """{config.model_type: Model}."""
    return {key: row for row in rows().values() for key in (row.name, *row.types)}


@functools.cache
def known(kind):
    """{class name: spec} over all rows; `kind` is "layers", "heads" or "left". Composite models hold other models' modules."""
    return {name: spec for row in rows().values() for name, spec in getattr(row, kind).items()}
