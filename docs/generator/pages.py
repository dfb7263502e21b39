"""All pages of the site, as {path in the site: content}; Markdown as text, files as paths. What there is, is found, not listed."""

import pathlib
import posixpath

from generator import ROOT, bench, kinds, pictures, results, tables, text
from generator.text import cell, table

OPS = "src/liger_kernel/ops"
# Sections of README.md that stand elsewhere; the others, and those to come, are on the home page.
STARTING = ("Install", "One line", "Two commands")
ELSEWHERE = {"Install": "getting-started.md", "Two commands": "getting-started.md", "What it saves": "results/index.md",
             "From C++": "cpp.md"}
MENU = (("Training", ("models", "trainers", "parallel", "hub-kernels", "chunked_loss")),
        ("Commands", ("commands", "profile", "memory", "numerics", "convergence")),
        ("C++", ("cpp",)))
PROJECT = ("decisions", "contributing", "changelog")


def sources():
    """{Markdown file of the repository: its page}."""
    found = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
             "bench/results/README.md": "results/index.md"}
    for pattern, page in ((f"{OPS}/*/README.md", "ops/{folder}.md"), ("src/liger_kernel/*/README.md", "{folder}.md"),
                          ("docs/*.md", "{stem}.md"), ("examples/*/README.md", "examples/{folder}.md"),
                          ("bench/results/*.md", "results/{stem}.md")):
        for path in sorted(ROOT.glob(pattern)):
            found.setdefault(path.relative_to(ROOT).as_posix(), page.format(folder=path.parent.name, stem=path.stem))
    return found


def documents():
    """{stem: content} of the JSON files of bench/results."""
    return {path.stem: results.read(path) for path in sorted(results.FOLDER.glob("*.json"))}


def linked(found, measured):
    """{path in the repository: page} for the links: `sources`, their folders, and what else has a page."""
    folders = {posixpath.dirname(source): page for source, page in found.items() if source.endswith("/README.md")}
    return {"bench/results": "results/index.md", OPS: "ops/index.md", "examples/cpp": "cpp.md", **folders, **found,
            **{f"bench/results/{stem}.json": f"results/{stem}.md" for stem in measured}}


class Site:
    """All pages; `draw` False leaves the pictures out."""

    def __init__(self, draw=True):
        self.draw, self.pages = draw, {"site.css": pathlib.Path(__file__).with_name("site.css")}
        self.sources, self.documents = sources(), documents()
        self.links = linked(self.sources, self.documents)
        parts = text.sections((ROOT / "README.md").read_text())
        gone = {*ELSEWHERE, *STARTING, "What is there"} - set(parts)
        if gone:
            raise text.Broken(f"README.md has no section {', '.join(sorted(gone))}, which docs/generator/pages.py names")
        self.from_readme(parts)
        for source, page in self.sources.items():
            if page not in self.pages and page != "results/index.md":
                self.pages[page] = self.moved((ROOT / source).read_text(), source, page) + self.beside(source, page)
        self.results(self.moved(parts["What it saves"], "README.md", "results/index.md"))
        self.pages |= {"models.md": tables.models(), "commands.md": tables.commands()}
        self.pages = {page: text.for_python_markdown(c) if isinstance(c, str) else c for page, c in self.pages.items()}

    def moved(self, markdown, source, page):
        """Markdown of a file of the repository for a page of the site."""
        markdown, files = text.rewrite_links(markdown, source, page, self.links)
        self.pages |= {target: ROOT / path for target, path in files.items()}
        return markdown

    def from_readme(self, parts):
        """README.md is the home page; its sections of other pages make those, with what they point to."""
        def section(name, page):
            return self.moved(parts[name], "README.md", page)

        home = "".join(section(name, "index.md") for name in parts if name not in ELSEWHERE)
        moved = "".join(f"* [{name}]({page}#{text.anchor(name)})\n" for name, page in ELSEWHERE.items())
        self.pages["index.md"] = f"{home}\n## On other pages\n\n{moved}"
        starting = "".join(section(name, "getting-started.md") for name in STARTING)
        self.pages["getting-started.md"] = f"# Getting started\n\n{starting}"
        guides = "".join(f"* [{text.title_of((ROOT / source).read_text())}]({page})\n" for source, page in self.sources.items()
                         if source.startswith("examples/cpp"))
        self.pages["cpp.md"] = "\n\n".join(["# C++ library", section("From C++", "cpp.md"), guides, tables.sources("examples/cpp")])
        # The ops with the first sentence of each README: the table that scripts/readme-tables has made of them.
        listed = "| op |" + parts["What is there"].partition("| op |")[2].partition("<!-- end -->")[0]
        self.pages["ops/index.md"] = "# Ops\n\n" + self.moved(listed, "README.md", "ops/index.md")

    def picture(self, stem, name, page):
        """The link to a picture of a document from a page, None without one; the picture joins the site."""
        names = kinds.pictures(self.documents[stem])
        if not self.draw or name not in names:
            return None
        target = f"results/{stem}/{names[name]}"
        self.pages[target] = pictures.drawn(stem, self.documents[stem]) / names[name]
        return posixpath.relpath(target, posixpath.dirname(page) or ".")

    def beside(self, source, page):
        """What stands under a folder's README: its exports and what was measured of it."""
        folder = pathlib.PurePosixPath(source).parent
        parts = []
        if folder.parent.as_posix() == OPS:
            parts.append(f"## Names\n\nIn `liger_kernel.ops`: {tables.code(tables.exports(ROOT / folder))}.")
        for stem, document in self.documents.items():
            if kinds.kind_of(document) != "bench":
                continue
            for (op, heap), rows in bench.groups(document).items():
                if op == folder.name:
                    where = posixpath.relpath(f"results/{stem}.md", posixpath.dirname(page) or ".")
                    heading = (f"## {results.device_of(document)}" + (f", {heap} heap" if heap else "") +
                               f"\n\n{document['date'][:10]}, torch {document['environment']['torch']}; all of it: [{stem}]({where}).")
                    parts.append(bench.op_part(document, op, heap, rows, self.picture(stem, (op, heap), page), heading))
        return "".join(f"\n{part}\n" for part in parts)

    def results(self, saved):
        """A page for every JSON file, with the text of a .md of the same name that was made from it; the index, with `saved`."""
        lines = []
        for stem, document in self.documents.items():
            page = f"results/{stem}.md"
            title, body = stem, self.pages.get(page)
            if body:
                title, body = text.title_of(body), body.partition("\n")[2]
            else:
                images = {name: self.picture(stem, name, page) for name in kinds.pictures(document)} if self.draw else {}
                body = kinds.page(document, images, self.name_of)
            self.pages[f"results/{stem}.json"] = results.FOLDER / f"{stem}.json"
            self.pages[page] = f"# {title}\n\nEvery number: [{stem}.json]({stem}.json).\n\n{results.facts(document)}\n\n{body}\n"
            lines.append((f"[{title}]({stem}.md)", results.device_of(document), document.get("date", "")[:10],
                          cell(results.commit_of(document))))
        for source, page in self.sources.items():
            stem = pathlib.PurePosixPath(page).stem
            if source.startswith("bench/results/") and page != "results/index.md" and stem not in self.documents:
                lines.append((f"[{text.title_of(self.pages[page])}]({stem}.md)", "", "", ""))
        source = "bench/results/README.md"
        intro = self.moved((ROOT / source).read_text(), source, "results/index.md") if (ROOT / source).exists() else "# Results\n"
        self.pages["results/index.md"] = f"{intro}\n## Pages\n\n{table(('', 'device', 'date', 'commit'), lines)}\n\n{saved}"

    def name_of(self, op):
        page = self.links.get(f"{OPS}/{op}") or self.links.get(f"src/liger_kernel/{op}")
        return f"[{op}]({posixpath.relpath(page, 'results')})" if page else op

    def menu(self):
        """The navigation; pages that nothing here names go to "Project"."""
        def under(folder):
            pages = (page for page in sorted(self.pages) if page.startswith(folder) and page.endswith(".md"))
            return [page for page in pages if not page.endswith("index.md")]

        menu = ["index.md", "getting-started.md", {"Ops": ["ops/index.md", *under("ops/")]}]
        menu += [{title: [f"{name}.md" for name in names if f"{name}.md" in self.pages] + (under("examples/") if title == "C++" else [])}
                 for title, names in MENU]
        menu.append({"Results": ["results/index.md", *under("results/")]})
        named = {"index.md", "getting-started.md", *(f"{name}.md" for _, names in MENU for name in names)}
        rest = [p for p in sorted(self.pages) if p.endswith(".md") and "/" not in p and p not in named]
        project = [f"{name}.md" for name in PROJECT if f"{name}.md" in rest]
        return [*menu, {"Project": project + [p for p in rest if p not in project]}]
