"""The `liger` command: doctor, ops, explain, models, bench, profile, memory, numerics, convergence, demo, hub, new-op.

Nothing here is imported by the library. The commands need packages that the kernels do not (`pip install liger-kernel[cli]`)."""


def require(*packages, purpose):
    """Exits with the remedy when a package that `purpose` needs is missing."""
    import importlib.util

    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        names = " ".join(missing)
        raise SystemExit(f"{purpose} needs {names}: run `pip install liger-kernel[cli]` (or `pip install {names}`)")


def main():
    """Entry point of `liger` and of `python -m liger_kernel.cli`."""
    require("typer", "rich", purpose="the liger command")
    from liger_kernel.cli.app import app

    app(prog_name="liger")
