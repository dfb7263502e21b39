"""`liger new-op`: one new folder under ops/, from templates/. No list anywhere else mentions an op, so nothing else changes."""

import keyword
import pathlib
import re

TEMPLATES = pathlib.Path(__file__).parent / "templates"
TAKEN = {"core", "ops", "liger_kernel", "utils", "backends"}  # names that ops/ or its C++ namespace already mean something by


def problem_with(name):
    """Why `name` cannot be an op's, or None."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        return "use lower-case words joined by single underscores; the name becomes a Python module and a C++ namespace"
    if keyword.iskeyword(name) or name in TAKEN:
        return "it means something already"
    return None


def file_name(template, name):
    """templates/test_op.py.tmpl -> test_<name>.py."""
    stem = template.name.removesuffix(".tmpl")
    return re.sub(r"^(test_)?op\.", rf"\g<1>{name}.", stem)


def fill(text, name):
    words = "".join(word.capitalize() for word in name.split("_"))
    return text.replace("@name@", name).replace("@Name@", words).replace("@NAME@", name.upper())


def write(name, ops):
    """Writes ops/<name>/ and returns its files. ValueError for a name that does not do, FileExistsError for a folder that is there."""
    problem = problem_with(name)
    if problem:
        raise ValueError(f"{name!r} cannot name an op: {problem}")
    folder = ops / name
    folder.mkdir()
    written = []
    for template in sorted(TEMPLATES.glob("*.tmpl")):
        path = folder / file_name(template, name)
        path.write_text(fill(template.read_text(), name))
        written.append(path)
    return written


def run(name, into):
    """Writes the folder and says what to do next; 2 when it cannot."""
    from liger_kernel.cli import record

    console = record.console()
    ops = into or pathlib.Path(__file__).parents[1] / "ops"
    if into is None and not (ops.parents[2] / "CMakeLists.txt").exists():
        console.print(f"[red]{ops} belongs to an installed package: run this in a source tree, or say --into FOLDER[/]", highlight=False)
        return 2
    try:
        written = write(name, ops)
    except (ValueError, FileExistsError, FileNotFoundError) as e:
        console.print(f"[red]{e}[/]", highlight=False)
        return 2
    console.print(f"wrote {written[0].parent}: {', '.join(p.name for p in written)}\n"
                  f"next: make build && pytest {written[0].parent}\n"
                  f"then replace the arithmetic: ref.py and cases.py first, {name}.h, cpu.isa.cpp, cuda.cu", highlight=False)
    return 0
