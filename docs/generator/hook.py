"""MkDocs' hook: the site's files and navigation are those of `pages.Site`; LIGER_DOCS_PICTURES=0 leaves the pictures out."""

import os
import pathlib
import sys

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from generator import pages, text


def on_files(files, config):
    for file in [f for f in files if f.src_dir == config.docs_dir]:
        files.remove(file)
    try:
        site = pages.Site(draw=os.environ.get("LIGER_DOCS_PICTURES") != "0")
    except text.Broken as e:
        raise PluginError(str(e)) from None
    for path, content in site.pages.items():
        where = {"content": content} if isinstance(content, str) else {"abs_src_path": str(content)}
        files.append(File.generated(config, path, **where))
    config.nav = site.menu()
    return files
