"""The pictures of results files, drawn by the commands that measured them; kept in build/ until the file or the code changes."""

import hashlib
import json
import pathlib
import shutil

from generator import ROOT, kinds

FOLDER = ROOT / "build/site-pictures"
CODE = ROOT / "src/liger_kernel/cli"


def code_of(kind):
    """The files that draw a kind, and what they share."""
    return [CODE / "record.py", *sorted((CODE / kind).glob("*.py"))]


def drawn(stem, document):
    """The folder of a document's pictures, drawn if they are not there."""
    kind = kinds.kind_of(document)
    digest = hashlib.sha256(json.dumps(document).encode())
    for path in code_of(kind):
        digest.update(path.read_bytes())
    folder = FOLDER / f"{stem}-{digest.hexdigest()[:16]}"
    if not folder.exists():
        for old in FOLDER.glob(f"{stem}-" + "[0-9a-f]" * 16):
            shutil.rmtree(old)
        half = pathlib.Path(f"{folder}.half")
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        kinds.KINDS[kind].draw(document, half)
        half.rename(folder)
    return folder
