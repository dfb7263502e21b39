"""Markdown as it lies in the repository -> Markdown for a page of the site."""

import posixpath
import re

from generator import ROOT

CODE = re.compile(r"(```.*?```|`[^`]*`)", re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^()\s]+)\)")


class Broken(Exception):
    """A link to a file that is not there, or a section that is gone."""


def rewrite_links(text, source, page, pages):
    """Links of the file `source` made links of the page `page`.

    Args:
        pages: {path in the repository: path in the site}, files and folders. A file without a page is one of the site's files, in
            `files/`; of a link to a folder without a page only the text is left.

    Returns:
        (text, {path in the site: path in the repository} of the files that it refers to).

    Raises:
        Broken: the repository has no such file.
    """
    files = {}

    def rewrite(match):
        image, words, href = match.groups()
        if re.match(r"[a-z]+:|#", href):
            return match.group()
        path, mark, anchor = href.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = pages.get(path)
        if target is None:
            if not (ROOT / path).exists():
                raise Broken(f"{source}: {href} is not there")
            if (ROOT / path).is_dir():
                return words
            target = f"files/{path}"
            files[target] = path
        return f"{image}[{words}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{mark}{anchor})"

    parts = CODE.split(text)
    # A link's words may be code: what lies between the parts of code is joined again around placeholders.
    code = parts[1::2]
    text = LINK.sub(rewrite, "".join(part if i % 2 == 0 else f"\0{i // 2}\0" for i, part in enumerate(parts)))
    return re.sub("\0(\\d+)\0", lambda m: code[int(m[1])], text), files


def for_python_markdown(text):
    """The renderer wants an empty line before a list and a table, and four spaces before what belongs to an item."""
    lines, width, fence = [], 0, False
    for line in text.splitlines():
        item = re.match(r"(?:[*-]|\d+\.) +", line)
        if line.lstrip().startswith("```"):
            fence = not fence
        elif fence:
            pass
        elif item:
            if not width and lines and lines[-1].strip():
                lines.append("")
            width = len(item.group())
        elif line.startswith("|") and lines and lines[-1].strip() and not lines[-1].startswith("|"):
            lines.append("")
        elif line.strip() and not line.startswith(" ") and (not lines or not lines[-1].strip() or line.startswith("#")):
            width = 0  # a paragraph after the list
        if width and line.startswith(" " * width) and not item:
            line = " " * (4 - width) + line
        lines.append(line)
    return "\n".join(lines) + "\n"


def title_of(text):
    """The first heading."""
    return re.search(r"^# (.+)$", text, re.MULTILINE)[1]


def anchor(heading):
    """The name that the renderer gives a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def sections(text):
    """{heading: text with its heading} by headings of the second level; "" is what stands before the first."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return {"": parts[0]} | {part.partition("\n")[0].removeprefix("## "): part for part in parts[1:]}


def table(head, rows, align=""):
    """A Markdown table; `align` has a letter for each column, r to the right. Texts must not contain a bare |."""
    rules = [{"r": "---:"}.get(letter, "---") for letter in align.ljust(len(head))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, rules, *rows))


def cell(value):
    """A value as one cell of a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")
