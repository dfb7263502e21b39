"""What every file of numbers says beside them, and the figures drawn from it."""

import datetime
import json
import os
import pathlib
import subprocess
import sys

WIDTH = 150  # of tables that go to a file or a pipe

PACKAGE = pathlib.Path(__file__).parents[1]


def console():
    """As wide as the terminal, and wide enough for the tables where there is none."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH)


def commit(folder):
    """The git commit of a folder, with "+changes" when files differ from it; None outside a repository."""
    def git(*arguments):
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return head and head + ("+changes" if git("status", "--porcelain") else "")


def document(device, **numbers):
    """The numbers with date, device, versions and commit."""
    from liger_kernel import env_report

    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "device": device,
            "environment": env_report.facts(), "commit": commit(PACKAGE), **numbers}


def write(path, content, console):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"every number: {path}", highlight=False)


def read(path, needs, command):
    """The content of a file that `command` wrote; SystemExit when it is another file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise SystemExit(f"{path} cannot be read: {e}") from None
    missing = [key for key in needs if not isinstance(content, dict) or key not in content]
    if missing:
        raise SystemExit(f"{path} has no {', '.join(missing)}: it was not written by `{command} --json`")
    return content


def failed(arms):
    """Whether an arm failed or did not come to its end in time; out of memory is an end."""
    return any(arm["status"] in ("failed", "out of time") for arm in arms.values())


def figure(width, height):
    """An empty Matplotlib figure in inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    result = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(result)
    return result
