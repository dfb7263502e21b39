"""examples/cpp_train: the installed C++ package trains a Llama without torch, and every step's loss is PyTorch's."""

import fcntl
import importlib.util
import math
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "examples" / "cpp_train"


def example(path):
    """A module of the examples by its path: with examples/ on sys.path, its folders would pass for packages called trl and axolotl."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if not SOURCE.is_dir():
    pytest.skip("needs the source tree", allow_module_level=True)
pytest.importorskip("transformers")
compare, tiny_data = example(SOURCE / "compare.py"), example(ROOT / "examples" / "tiny_data.py")

# Heads share keys, head_dim 12 is no whole number of vectors, and the sequence is no power of two.
SIZES = dict(hidden=48, intermediate=80, layers=2, heads=4, kv_heads=2)
RUN = dict(steps=20, batch=4, seq=40, lr=3e-3)


def cache(build):
    """A build folder's CMake variables."""
    lines = (line.partition("=") for line in (build / "CMakeCache.txt").read_text().splitlines() if line[:1].isalpha())
    return {name.partition(":")[0]: value for name, _, value in lines}


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The example, built against an installed package. The package is of the build that `make test-cpp` leaves, brought up to date,
    sanitizers and all; LIGER_CPP_BUILD names another build folder."""
    build = pathlib.Path(os.environ.get("LIGER_CPP_BUILD", ROOT / "build" / "asan"))
    cmake = shutil.which("cmake", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None or not (build / "CMakeCache.txt").exists():
        pytest.skip(f"no build of the C++ library in {build}: make test-cpp makes one")
    session = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent  # of all workers: the first one builds
    folder = session / "cpp_train"
    folder.mkdir(exist_ok=True)
    program = folder / "build" / "train"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return program
        options = cache(build)
        sanitize = "-fsanitize=address,undefined -fno-sanitize-recover=undefined" if options["LIGER_SANITIZE"] == "ON" else ""
        run(cmake, "--build", build, "--target", "liger_kernel")
        run(cmake, "--install", build, "--component", "cpp", "--prefix", folder / "prefix")
        run(cmake, "-S", SOURCE, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}", "-DCMAKE_BUILD_TYPE=Debug",
            f"-DCMAKE_CXX_FLAGS=-O1 {sanitize}", f"-DCMAKE_CXX_COMPILER={options['CMAKE_CXX_COMPILER']}")
        run(cmake, "--build", folder / "build")
    return program


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(". ".join(tiny_data.SENTENCES))
    return path


@pytest.fixture(params=["cpu", "cuda"])
def device(request, program, text):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        tried = subprocess.run([program, "--text", text, "--device", "cuda", "--steps", "1"], capture_output=True, text=True, check=False)
        if "built without CUDA" in tried.stderr:
            pytest.skip("the C++ library was built without CUDA: LIGER_CPP_BUILD names a build with it")
    return request.param


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_losses_are_pytorchs(program, text, tmp_path, device, eps):
    """The first loss differs by the rounding of one fp32 forward pass. Later ones inherit the difference of the weights: AdamW divides
    a gradient by its own size, so where a gradient is little but rounding, a step may differ by as much as lr, though the loss hardly
    changes along such a weight. With eps = 1e-3 such gradients stay small, and a wrong factor in any gradient, which AdamW would
    divide away, shows in the weights. Measured on a CPU: losses within 2e-7 both ways; weights, relative to how far they moved, within
    7e-6 and 4e-7; a factor of 1.01 in the gradient of the keys alone gives 2e-4 in the latter and in nothing else."""
    model = compare.make_model(**SIZES)
    start = compare.flat(model)
    weights = tmp_path / "weights.bin"
    compare.write_weights(model, weights)
    cpp, trained = compare.train_cpp(program, tmp_path, text, weights, threads=2, eps=eps, device=device, **RUN)
    expected = compare.train_torch(model, text.read_bytes(), eps=eps, device=device, **RUN)
    assert len(cpp) == RUN["steps"] and cpp[0] == pytest.approx(expected[0], rel=1e-6)
    assert cpp == pytest.approx(expected, rel=1e-4 if eps < 1e-5 else 1e-5)
    moved, difference = compare.flat(model) - start, trained - compare.flat(model)
    assert difference.norm() <= (1e-3 if eps < 1e-5 else 1e-5) * moved.norm()
    assert cpp[0] == pytest.approx(math.log(256), rel=0.1) and cpp[-1] < 0.6 * cpp[0]


def test_random_weights_and_threads(program, text, tmp_path):
    """Without --weights the run depends on the seed alone, not on the number of threads."""
    def log_of(seed, threads):
        log = tmp_path / f"{seed}-{threads}.log"
        run(program, "--text", text, "--hidden", "32", "--heads", "2", "--kv-heads", "1", "--layers", "1", "--steps", "3", "--batch", "2",
            "--seq", "16", "--seed", str(seed), "--threads", str(threads), "--log", log)
        return log.read_text()

    assert log_of(0, 1) == log_of(0, 3) != log_of(1, 1)


@pytest.mark.parametrize("options, message", [
    ([], "which text"),
    (["--text", "{text}", "--steps", "few"], "--steps: few is no number"),
    (["--text", "{text}", "--stepz", "3"], "--stepz is no option"),
    (["--text", "{text}", "--heads", "3"], "hidden size 128 is not heads (3) times an even number"),
    (["--text", "{text}", "--seq", "100000"], "a window of --seq 100000 needs 100001"),
    (["--text", "{text}", "--weights", "{text}"], "is no weights file"),
    (["--text", "{text}", "--device", "tpu"], "tpu is neither cpu nor cuda"),
])
def test_errors_say_what_is_wrong(program, text, options, message):
    done = subprocess.run([program, *(o.format(text=text) for o in options)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and message in done.stderr, done.stderr
