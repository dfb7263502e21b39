"""C113: the library depends on what torch promises to keep, and the build says in words what it misses."""

import pathlib
import shutil
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_only_the_stable_interface_of_torch():
    """Undefined symbols of torch are those of its stable C interface: no C++ class of torch, ATen or c10, whose layout may change."""
    from liger_kernel import _native

    listed = subprocess.run(["nm", "-D", "--undefined-only", "--demangle", _native.PATH], capture_output=True, text=True, check=True).stdout
    names = [line.split(maxsplit=1)[1] for line in listed.splitlines()]
    unstable = [n for n in names if n.startswith(("at::", "c10::", "torch::", "caffe2::", "Py", "_Py"))]
    assert any(n.startswith(("aoti_torch_", "torch_")) for n in names) and not unstable, unstable


def test_build_without_torch_says_so(tmp_path):
    """An interpreter without torch is refused at configuration, with what to do."""
    cmake = pathlib.Path(sys.executable).parent / "cmake"
    if not (ROOT / "CMakeLists.txt").exists() or not cmake.exists():
        pytest.skip("needs the source tree and cmake")
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path / "build", "-DLIGER_TORCH=ON", "-DLIGER_CUDA=OFF", f"-DLIGER_PYTHON={tmp_path}/bare/bin/python"],
        capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "install torch >= 2.10 first" in " ".join(done.stderr.split())
