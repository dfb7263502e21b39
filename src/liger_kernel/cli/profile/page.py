"""The one self-contained HTML page of `liger profile` and `liger memory`: verdict, tables and charts, nothing from a network."""

import base64
import html

from liger_kernel.cli.demo.report import STYLE


def table(heads, rows):
    """The HTML of a table of texts."""
    def line(cells, tag):
        return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>\n"

    return f"<table>{line(heads, 'th')}{''.join(line(row, 'td') for row in rows)}</table>\n"


def page(title, document, sections, images):
    """The text of a page.

    Args:
        sections: [(sentence above the table, heads, rows)], texts.
        images: paths of PNG files.
    """
    tables = "".join(f"<p>{html.escape(text)}</p>{table(heads, rows)}" for text, heads, rows in sections)
    encoded = [(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in images]
    pictures = "".join(f'<img alt="{html.escape(stem)}" src="data:image/png;base64,{data}">\n' for stem, data in encoded)
    facts = [document["date"], f"commit {document['commit']}", *(f"{name} {value}" for name, value in document["environment"].items())]
    bad = "" if all(arm["status"] == "ok" for arm in document["arms"].values()) and document.get("losses_agree", True) else " bad"
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>
<h1>{html.escape(title)}</h1>
<p class="found{bad}">{html.escape(document['verdict'])}</p>
{tables}{pictures}<footer>{html.escape("; ".join(facts))}</footer></html>
"""


def write(document, out):
    """profile.html beside the profile.png that it embeds. Returns its path."""
    from liger_kernel.cli.profile import report

    heads, rows = ["", *document["arms"]], [(what, *cells) for what, cells in report.rows(document)]
    path = out / "profile.html"
    sections = [(report.describe(document) + ". Backward is booked on the part that caused it. The traces beside this page open in "
                 "Perfetto or chrome://tracing.", heads, rows)]
    path.write_text(page("One training step", document, sections, [out / "profile.png"]), encoding="utf-8")
    return path
