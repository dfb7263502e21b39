"""The site's pages: all that should be there is, numbers are those of the files, links hold. The build itself runs where MkDocs is."""

import functools
import html.parser
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest

pytest.importorskip("typer", reason="the pages describe the liger command")
pytest.importorskip("matplotlib", reason="the pages have pictures")
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from generator import kinds, pages, results, tables, text  # noqa: E402

JSON = sorted((ROOT / "bench/results").glob("*.json"))
BENCH = [path for path in JSON if "rounds" in json.loads(path.read_text())]
OPS = [path.parent for path in sorted((ROOT / "src/liger_kernel/ops").glob("*/__init__.py")) if tables.exports(path.parent)]


@functools.cache
def site():
    return pages.Site(draw=False)


def table_rows(markdown):
    """[{column: cell}] of the tables in a text."""
    found, head = [], None
    for line in markdown.splitlines():
        cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else None
        if cells is None:
            head = None
        elif head is None:
            head = cells
        elif not set("".join(cells)) <= set("-: "):
            found.append(dict(zip(head, cells, strict=True)))
    return found


def same(written, value):
    """Whether a number was rounded to what is written."""
    digits = len(written.partition(".")[2])
    return abs(float(written) - value) <= 0.5001 * 10**-digits


@pytest.mark.parametrize("folder", OPS, ids=lambda folder: folder.name)
def test_every_op_has_a_page_with_its_readme(folder):
    page = site().pages[f"ops/{folder.name}.md"]
    title = text.title_of((folder / "README.md").read_text())
    assert page.startswith(f"# {title}\n")
    assert all(f"`{name}`" in page for name in tables.exports(folder))


@pytest.mark.parametrize("path", [*JSON, *sorted((ROOT / "bench/results").glob("*.md"))], ids=lambda path: path.name)
def test_every_results_file_has_a_page(path):
    page = f"results/{'index' if path.name == 'README.md' else path.stem}.md"
    assert page in site().pages
    if path.suffix == ".json":
        document = json.loads(path.read_text())
        assert site().pages[f"results/{path.name}"] == path
        rows = {row[""]: row for row in table_rows(site().pages["results/index.md"]) if "commit" in row}
        row = next(row for name, row in rows.items() if name.endswith(f"({path.stem}.md)"))
        assert row["date"] == document.get("date", "")[:10]
        for name, value in document["environment"].items():
            assert f"| {name} | {value} |" in site().pages[page]


def test_every_page_is_in_the_menu_once():
    def leaves(node):
        return [node] if isinstance(node, str) else [leaf for part in (node.values() if isinstance(node, dict) else node)
                                                     for leaf in leaves(part)]

    assert sorted(leaves(site().menu())) == sorted(page for page in site().pages if page.endswith(".md"))


def test_no_machine_paths():
    path = re.compile(r"(?<![\w.$}/-])/(home|root|Users|work|mnt|scratch)/\w|[A-Z]:\\\\?Users")
    texts = {page: content for page, content in site().pages.items() if isinstance(content, str)}
    assert not [f"{page}: {match.group()}" for page, content in texts.items() for match in path.finditer(content)]
    assert str(ROOT) not in "".join(texts.values())


def check_numbers(markdown, rows, device):
    """The lines of a table against the rows of a file of `liger bench`, as the file has them."""
    key, second = ("wall_ms", "CPU ms") if device == "cpu" else ("kernel_ms", "call ms")
    lines = [line for line in table_rows(markdown) if "pass" in line]
    assert [(line["case"], line["pass"]) for line in lines] == [(row["case"], row["pass"]) for row in rows]
    for line, row in zip(lines, rows, strict=True):
        ours, found = row["contenders"]["liger"], row["contenders"]
        time = ours[key]["median"]
        assert same(line["wall ms" if device == "cpu" else "kernel ms"], time)
        assert same(line[second], ours["cpu_ms" if device == "cpu" else "wall_ms"]["median"])
        share = line["of copy or products"]
        if share:
            assert same(share.partition("%")[0], 100 * (ours["share_of_gemm"] if "products" in share else ours["share_of_copy"]))
        for name, other in found.items():
            if name != "liger":
                (written,) = (cell for column, cell in line.items() if column.startswith(f"{name} / ours"))
                assert same(written.partition("x")[0], other[key]["median"] / time)
            size = line[f"memory, {'ours' if name == 'liger' else name}"]
            value, unit = size.split()
            assert same(value, other["peak_bytes"] / {"GB": 1e9, "MB": 1e6, "kB": 1e3}[unit])


@pytest.mark.parametrize("path", BENCH, ids=lambda path: path.stem)
def test_numbers_of_a_bench_page_are_the_files(path):
    document = json.loads(path.read_text())
    check_numbers(site().pages[f"results/{path.stem}.md"], document["results"], document["device"])


@pytest.mark.parametrize("folder", OPS, ids=lambda folder: folder.name)
def test_numbers_of_an_op_page_are_the_files(folder):
    parts = text.sections(site().pages[f"ops/{folder.name}.md"])
    for path in BENCH:
        document = json.loads(path.read_text())
        rows = [row for row in document["results"] if row["op"] == folder.name]
        if rows:
            check_numbers("".join(part for part in parts.values() if f"[{path.stem}]" in part), rows, document["device"])


def of_kind(*names):
    paths = [path for path in JSON if kinds.kind_of(json.loads(path.read_text())) in names]
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


@of_kind("step", "profile")
def test_numbers_of_a_step_page_are_the_files(path):
    rows = {line[""]: line for line in table_rows(site().pages[f"results/{path.stem}.md"]) if "" in line}
    for name, arm in json.loads(path.read_text())["arms"].items():
        if arm["status"] == "ok":
            assert float(rows["tokens/s (median step)"][name].partition(" ")[0].replace(",", "")) == round(arm["tokens_per_s"])
            what, size = ("peak memory allocated", arm["peak_allocated"]) if "peak_allocated" in arm else (
                "peak memory above the model", arm["peak_above_model"])
            value, unit, *_ = rows[what][name].split()
            assert same(value, size / {"GB": 1e9, "MB": 1e6}[unit])


@of_kind("memory")
def test_numbers_of_a_memory_page_are_the_files(path):
    page = site().pages[f"results/{path.stem}.md"]
    lines = {(line["arm"], line["vocabulary"], line["tokens"]): line for line in table_rows(page) if "error" in line}
    document = json.loads(path.read_text())
    assert document["verdict"] in page
    for name, arm in document["arms"].items():
        for point in arm["points"]:
            if "peak" in point:
                value, unit = lines[name, f"{point['vocab']:,}", f"{point['batch']} x {point['seq']}"]["peak"].split()
                assert same(value, point["peak"] / {"GB": 1e9, "MB": 1e6}[unit])


@of_kind("demo")
def test_a_demo_page_says_what_the_demo_said(path):
    assert json.loads(path.read_text())["found"]["sentence"] in site().pages[f"results/{path.stem}.md"]


def drawn(document, folder):
    """The page of a document, after its pictures were drawn."""
    kind = kinds.KINDS[kinds.kind_of(document)]
    kind.draw(document, folder)
    names = kinds.pictures(document)
    assert sorted(names.values()) == sorted(path.name for path in folder.iterdir())
    return kinds.page(document, names, str)


def test_a_convergence_report_has_a_page(tmp_path):
    log = {"step": [1, 2], "tokens": [8, 16], "loss": [2.0, 1.5], "grad_norm": [1.0, 0.5], "tokens_per_s": [100.0, 110.0],
           "memory_bytes": [10**9, 2 * 10**9]}
    document = {"settings": {"name": "tiny", "precision": "fp32", "steps": 2, "batch": 1, "seq": 8}, "parameters": 1000, "device": "cpu",
                "data": "text", "limit": 0.01, "arms": {"baseline": log, "liger": log | {"loss": [2.0, 1.506]}}}
    page = drawn(document, tmp_path)
    assert "PASS: over 16 tokens" in page
    assert table_rows(page)[2] == {"": "loss at the end, smoothed", "without the kernels": "1.50000", "with the kernels": "1.50600"}


def test_a_numerics_report_has_a_page(tmp_path):
    pytest.importorskip("torch", reason="liger numerics draws with it")

    def row(of_bound, eager):
        return {"op": "rope", "dtype": "bfloat16", "pass": "forward", "regime": "tiny", "case": "2x8", "what": "q", "failed": None,
                "ours": {"of_bound": of_bound, "ulps": 1.0, "absolute": 1e-3}, "eager": eager and {"of_bound": eager, "ulps": 3.0}}

    document = {"device": "cpu", "results": [row(0.25, None), row(0.75, 0.5)], "modules": [], "failures": [], "missing": []}
    page = drawn(document, tmp_path)
    assert "PASS: 2 of 2 tensors of 1 ops" in page
    assert list(table_rows(page)[0].values()) == ["rope", "bfloat16", "forward", "0.75", "0.50", "1", "3", "tiny, 2x8"]


def test_a_file_of_an_unknown_kind_has_its_numbers():
    document = {"date": "2030-01-01", "environment": {}, "found": {"worst": 0.25}, "rows": [{"name": "a|b", "time": {"s": 1.5}}]}
    page = kinds.page(document, {}, str)
    assert "| found worst | 0.25 |" in page
    assert table_rows(page)[-1] == {"name": "a\\|b", "time s": "1.5"}


def test_every_row_of_the_model_table_is_there():
    from liger_kernel.patch.models import rows

    page = site().pages["models.md"]
    parts = text.sections(page)
    for name, row in rows().items():
        part = parts[name]
        missing = [word for word in (*row.norms, *row.mlps, *row.ropes, *row.heads, *row.left) if f"`{word}`" not in part]
        assert not missing, f"{name} lacks {missing}"
        assert all(f"`{kind}`" in page for kind in row.types)


def test_links_are_rewritten():
    links = {"src/ops/rope": "ops/rope.md", "src/ops/rope/README.md": "ops/rope.md", "docs/a.md": "a.md"}

    def rewrite(markdown):
        return text.rewrite_links(markdown, "src/ops/norm/README.md", "ops/norm.md", links)

    assert rewrite("[`rope`](../rope), [a](../../../docs/a.md#b)") == ("[`rope`](rope.md), [a](../a.md#b)", {})
    assert rewrite("[x](https://example.org/a.md) [y](#z) `[q](r)`") == ("[x](https://example.org/a.md) [y](#z) `[q](r)`", {})
    assert rewrite("[licence](../../../LICENSE), [all](../../../src)") == ("[licence](../files/LICENSE), all", {"files/LICENSE": "LICENSE"})
    with pytest.raises(text.Broken, match=r"src/ops/norm/README.md: \.\./gone is not there"):
        rewrite("[x](../gone)")


def test_lists_are_written_for_the_renderer():
    made = text.for_python_markdown("Of these\n* one\n\n  | a |\n  |---|\n* two\n  and more\n\nThe end\n  as it was\n| t |\n|---|\n")
    assert made == "Of these\n\n* one\n\n    | a |\n    |---|\n* two\n    and more\n\nThe end\n  as it was\n\n| t |\n|---|\n"


def test_a_picture_is_drawn_for_each_op(tmp_path):
    document = results.read(BENCH[0])
    document["results"] = list({row["op"]: row for row in reversed(document["results"])}.values())[:2]
    page = drawn(document, tmp_path)
    assert page.count("![") == 2


class References(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        self.found += [value for key, value in attrs if key in ("href", "src") and value]


@pytest.mark.skipif(not (importlib.util.find_spec("mkdocs") and importlib.util.find_spec("material")), reason="needs mkdocs-material")
def test_the_strict_build_passes(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)]
    environment = os.environ | {"LIGER_DOCS_PICTURES": "0", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = sorted(tmp_path.rglob("*.html"))
    assert len(built) >= len([page for page in site().pages if page.endswith(".md")])
    for page in built:
        for reference in References(page).found:
            parts = urllib.parse.urlsplit(reference)
            if not parts.scheme and not parts.netloc and parts.path and not reference.startswith("/") and page.name != "404.html":
                assert (page.parent / urllib.parse.unquote(parts.path)).exists(), f"{page.relative_to(tmp_path)}: {reference}"
