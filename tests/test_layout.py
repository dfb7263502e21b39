"""What the layout promises and no compiler checks: where torch may be included, what an op folder holds, that nothing central
names an op, file sizes, licence, paths, exports. Needs neither a build nor torch."""

import ast
import os
import pathlib
import re
import subprocess
import warnings

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "liger_kernel"
NOT_OPS = {"backends", "cute"}  # packages of the reference's names that hold no op
OPS = sorted(p.parent.name for p in SOURCE.glob("ops/*/__init__.py") if p.parent.name not in NOT_OPS)
CXX = {".h", ".cpp", ".cu", ".cuh", ".inc", ".inl"}
CODE = CXX | {".py", ".cmake"}

NATIVE_FILES = ["{op}.h", "variants.inc", "{op}.cpp", "cpu*.isa.cpp", "cuda*.cu", "torch.cpp"]
PYTHON_FILES = ["__init__.py", "ref.py", "cases.py", "test_{op}.py", "bench.py", "README.md"]


def _files():
    """Every file of the project: those git tracks or would track; outside a checkout, all but build outputs."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in ("build", "dist", "__pycache__") and not f.startswith(".")]
        found += [pathlib.Path(folder) / n for n in names]
    return found


FILES = _files()
TEXTS = {}
for _path in FILES:
    try:
        TEXTS[_path.relative_to(ROOT).as_posix()] = _path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        pass  # an image


def _is_code(name):
    return pathlib.PurePosixPath(name).suffix in CODE or name.endswith("CMakeLists.txt")


def _offenders(pattern, names, strip=None):
    """"file:line: text" of every line that matches."""
    found = []
    for name in names:
        for number, line in enumerate(TEXTS[name].splitlines(), 1):
            if re.search(pattern, strip(line) if strip else line):
                found.append(f"{name}:{number}: {line.strip()}")
    return found


def test_torch_is_included_only_where_it_may_be():
    allowed = re.compile(r"src/liger_kernel/(ops/\w+/torch\.cpp|core/torch/.*)$|src/liger_kernel/cli/templates/")
    names = [n for n in TEXTS if pathlib.PurePosixPath(n).suffix in CXX and not allowed.match(n)]
    found = _offenders(r"#\s*include\s*[<\"](torch|ATen|c10|caffe2)/|liger_kernel/core/torch/", names)
    assert not found, "torch belongs in ops/*/torch.cpp and core/torch:\n" + "\n".join(found)


@pytest.mark.parametrize("op", OPS)
def test_op_folder_is_complete(op):
    folder = SOURCE / "ops" / op
    native = any(p.suffix in CXX for p in folder.iterdir())
    wanted = [f.format(op=op) for f in PYTHON_FILES + (NATIVE_FILES if native else [])]
    missing = [f for f in wanted if not any(folder.glob(f))]
    assert not missing, f"ops/{op} lacks {', '.join(missing)}"
    if native:
        for name in (f"{op}.h", f"{op}.cpp"):
            text = (folder / name).read_text()
            assert f"namespace liger::{op} " in text, f"ops/{op}/{name}: its namespace is not liger::{op}"
            assert f"liger_kernel/ops/{op}/variants.inc" in text, f"ops/{op}/{name} does not expand variants.inc"


def test_every_op_folder_is_a_package():
    folders = {name.split("/")[3] for name in TEXTS if name.startswith("src/liger_kernel/ops/") and name.count("/") > 3}
    stray = sorted(folders - set(OPS) - NOT_OPS)
    assert not stray, f"ops folders without __init__.py: {', '.join(stray)}"


def _python_words(text):
    """Names, attributes, imports and strings of a module, docstrings left out."""
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body and isinstance(node.body[0], ast.Expr)
    }
    words = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.append(node.id)
        elif isinstance(node, ast.Attribute):
            words.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            words += [node.module or "", *(a.name for a in node.names)]
        elif isinstance(node, ast.Import):
            words += [a.name for a in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words.append(node.value)
    return words


def test_nothing_central_names_an_op():
    """A new op is one new folder: the core and the build know no op. Comments may give one as an example.

    A name of several words is the op's wherever it stands; one word may be an ordinary one, and counts as a path, a namespace
    or a target."""
    names = "|".join(map(re.escape, OPS))
    several = "|".join(re.escape(op) for op in OPS if "_" in op)
    pattern = rf"(?<![A-Za-z0-9])({several})(?![A-Za-z0-9])|ops[/.]({names})\b|\b({names})::|\bliger_({names})\b"
    central = [n for n in TEXTS if n.startswith(("src/liger_kernel/core/", "cmake/", "CMakeLists.txt", "src/CMakeLists.txt"))]
    found = _offenders(pattern, [n for n in central if pathlib.PurePosixPath(n).suffix in CXX], lambda line: line.split("//")[0])
    found += _offenders(
        pattern, [n for n in central if n.endswith((".cmake", ".cmake.in", "CMakeLists.txt"))], lambda line: line.split("#")[0]
    )
    for name in central:
        if name.endswith(".py"):
            found += [f"{name}: {word}" for word in _python_words(TEXTS[name]) if re.search(pattern, word)]
    assert not found, "named in the core or the build:\n" + "\n".join(found)


def test_file_sizes():
    sizes = {name: text.count("\n") for name, text in TEXTS.items() if _is_code(name)}
    for name, lines in sorted(sizes.items()):
        if 400 < lines <= 700:
            warnings.warn(f"{name} has {lines} lines; 400 read better", stacklevel=1)
    large = [f"{name}: {lines}" for name, lines in sizes.items() if lines > 700]
    assert not large, "files over 700 lines:\n" + "\n".join(large)


def test_licence_is_in_one_place():
    """LICENSE holds for everything; a header in some files would only say that others lack it."""
    pattern = "SPDX-" + "License|Licensed " + r"under the|Copyright (\(c\)|©|\d{4})"
    found = _offenders(pattern, [n for n in TEXTS if n != "LICENSE"])
    assert not found, "licence texts outside LICENSE:\n" + "\n".join(found)


def test_no_machine_paths():
    pattern = r"(?<![\w.$}/-])/(home|root|Users|work|mnt|scratch)/\w|[A-Z]:\\\\?Users"
    found = _offenders(pattern, TEXTS)
    assert not found, "paths of one machine:\n" + "\n".join(found)


def test_nothing_is_left_to_do():
    found = _offenders(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b", [n for n in TEXTS if _is_code(n)])
    assert not found, "\n".join(found)


def _defined(tree):
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name))
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            names.update((a.asname or a.name).split(".")[0] for a in node.names)
    return names


def test_exports_are_literal_defined_and_unique():
    """`liger_kernel.ops` reads EXPORTS without importing the folder."""
    owner = {}
    for op in OPS:
        tree = ast.parse((SOURCE / "ops" / op / "__init__.py").read_text())
        lists = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "EXPORTS"]
        assert len(lists) == 1, f"ops/{op}/__init__.py assigns EXPORTS {len(lists)} times, expected once"
        literal = isinstance(lists[0], ast.List) and all(isinstance(e, ast.Constant) and isinstance(e.value, str) for e in lists[0].elts)
        assert literal, f"ops/{op}/__init__.py: EXPORTS is not a literal list of strings"
        names = [e.value for e in lists[0].elts]
        undefined = set(names) - _defined(tree)
        assert "__getattr__" in _defined(tree) or not undefined, f"ops/{op} exports {', '.join(sorted(undefined))} without defining them"
        for name in names:
            assert name not in owner, f"{name} is exported by ops/{owner[name]} and ops/{op}"
            owner[name] = op
