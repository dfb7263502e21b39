"""Writes a kernel repository, the folder that `kernels` loads and the Hub serves, from the installed package."""

import json
import pathlib
import platform
import shutil

NAME, VERSION = "liger-kernels", 1
STABLE_ABI = "torch-stable-abi210"  # TORCH_TARGET_VERSION of the build: torch 2.10 and later

UNIVERSAL = '''"""These layers are the installed liger_kernel's: pip install liger-kernel."""

from liger_kernel.hub import layers

__all__ = ["layers"]
'''

BUNDLED = '''"""These layers come with a copy of liger_kernel. An installed liger_kernel is used instead: both would register the same
operators."""

import importlib.util
import pathlib
import sys


def _load():
    spec = importlib.util.find_spec("liger_kernel")
    if spec is None:
        init = pathlib.Path(__file__).parent / "liger_kernel" / "__init__.py"
        spec = importlib.util.spec_from_file_location("liger_kernel", init, submodule_search_locations=[str(init.parent)])
        sys.modules["liger_kernel"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif importlib.util.find_spec("liger_kernel.hub") is None:
        raise ImportError("the installed package liger_kernel is another project's; uninstall it, or do not load this kernel")
    from liger_kernel.hub import layers

    return layers


layers = _load()

__all__ = ["layers"]
'''

README = """---
library_name: kernels
license: apache-2.0
---

Layers of [liger_kernel](https://pypi.org/project/liger-kernel) {version} for `kernels` and transformers' `use_kernels`:

{layers}
"""


def _metadata(variant, backend):
    from liger_kernel import __version__

    return {"id": f"_{NAME.replace('-', '_')}_{variant}_{__version__}".replace("-", "_").replace(".", "_").replace("+", "_"), "name": NAME,
            "version": VERSION, "license": "Apache-2.0", "python-depends": [], "backend": {"type": backend}}


def _variant(folder, variant, backend, init):
    path = folder / "build" / variant
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    (path / "__init__.py").write_text(init)
    (path / "metadata.json").write_text(json.dumps(_metadata(variant, backend), indent=2) + "\n")
    return path


def backends():
    """{part of a variant's name: back end} of the loaded library: the CPU, and CUDA when it was built with it."""
    import torch

    from liger_kernel import _native

    try:
        _native.machine(0)
        built = True
    except ValueError as e:  # the other reason is that there is no such device
        built = "no CUDA back end" not in str(e)
    cuda = {f"cu{torch.version.cuda.replace('.', '')}": "cuda"} if built and torch.version.cuda else {}
    return {"cpu": "cpu", **cuda}


def _copy_package(into):
    """The package as a wheel holds it, less tests and the command line, and the library that is loaded."""
    from liger_kernel import _native

    source = pathlib.Path(__file__).resolve().parent.parent
    for path in source.rglob("*.py"):
        relative = path.relative_to(source)
        if relative.parts[0] == "cli" or relative.name.startswith("test_") or "__pycache__" in relative.parts:
            continue
        (into / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, into / relative)
    shutil.copyfile(_native.PATH, into / "_C.abi3.so")


def write(folder, bundle=True):
    """Writes a kernel repository to `folder`, over an older one that is there.

    Args:
        folder: is made where it is missing.
        bundle: also write variants with a copy of the package and its library, which need nothing installed but torch: one for the
            CPU, and one for the CUDA version of this torch when the library has CUDA. Without, only the variant for every system,
            whose layers are the installed package's.

    Returns:
        The paths of the variants.

    Raises:
        FileExistsError: `folder` holds something else.
    """
    from liger_kernel import __version__
    from liger_kernel.hub import LAYERS

    folder = pathlib.Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "build").is_dir():
        raise FileExistsError(f"{folder} is no kernel repository: it has files but no folder build; name an empty folder")
    written = [_variant(folder, "torch-universal", "cpu", UNIVERSAL)]
    for name, backend in backends().items() if bundle else ():
        path = _variant(folder, f"{STABLE_ABI}-{name}-{platform.machine()}-{platform.system().lower()}", backend, BUNDLED)
        _copy_package(path / "liger_kernel")
        written.append(path)
    lines = "\n".join(f"* `{name}`: `{layer}`" for name, layer in LAYERS.items())
    (folder / "README.md").write_text(README.format(version=__version__, layers=lines))
    return written
