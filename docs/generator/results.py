"""The files of bench/results, and what every page says of them: device, versions, date, commit."""

import json
import pathlib

from generator import ROOT
from generator.kinds import kind_of
from generator.text import cell, table
from liger_kernel.cli.bench import report as bench
from liger_kernel.cli.step import report as step

FOLDER = ROOT / "bench/results"


def read(path):
    """The content of a file, with the derived numbers that older files lack."""
    document = json.loads(pathlib.Path(path).read_text())
    if kind_of(document) == "bench":
        bench.derive(document["results"], document["device"])
    elif kind_of(document) == "step":
        step.derive(document)
    return document


def device_of(document):
    environment = document.get("environment", {})
    device = document.get("device") or document.get("settings", {}).get("device", "cpu")
    return environment.get("CPU", device) if device == "cpu" else environment.get("CUDA devices", device)


def commit_of(document):
    return document.get("commit") or document.get("environment", {}).get("commit") or "not recorded"


def facts(document):
    """The table of what was measured where, when and with which versions."""
    found = {"date": document.get("date", "not recorded"), "commit": commit_of(document)}
    found |= {key: document[key] for key in ("device", "rounds", "against", "against_commit", "note") if document.get(key) is not None}
    found |= {key: value for key, value in document.get("environment", {}).items() if key != "commit"}
    return table(("", ""), ((key, cell(value)) for key, value in found.items()))
