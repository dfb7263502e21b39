"""One benchmark process. Run by path with a JSON configuration as its argument; writes a JSON line an event.

It is its own process so that malloc can be set up from the environment, and so that another package that provides
liger_kernel can take this one's place (`package`): then only core/bench.py, this folder and the ops' ref.py, cases.py and
bench.py come from here, and everything they call from that package.
"""

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import types

PIPE = int(os.environ.pop("LIGER_EVENT_PIPE", 1))  # as in cli/child.py, which another package in our place does not have
PASSES = ("forward", "forward+backward")


def emit(**event):
    with open(PIPE, "w", closefd=False) as pipe:
        pipe.write(json.dumps(event) + "\n")


def wait_for_turn():
    """Lets the process that this one is paired with run until its next round."""
    emit(event="ready")
    if not sys.stdin.readline():
        raise SystemExit("the bench command has gone")


def load(name, path):
    """The module `name` from `path`, without importing its parents: they may be another package's."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def adopt(op, bench):
    """Gives the other package's `liger_kernel.ops.<op>` the public names that bench.py takes from it: packages keep them in
    different modules."""
    name = f"liger_kernel.ops.{op}"
    try:
        module = importlib.import_module(name)
    except ImportError:
        module = sys.modules[name] = types.ModuleType(name)
    wanted = [a.name for n in ast.walk(ast.parse(bench.read_text())) if isinstance(n, ast.ImportFrom) and n.module == name for a in n.names]
    for public in wanted:
        for home in ("liger_kernel.transformers.functional", "liger_kernel.transformers", "liger_kernel.ops"):
            if hasattr(module, public):
                break
            with contextlib.suppress(ImportError, AttributeError):
                setattr(module, public, getattr(importlib.import_module(home), public))
    return module


def stand_in(root, package):
    """Makes `package` the provider of liger_kernel, with this package's harness files beside its modules. What does not load
    here is missing in a bench.py later, which reports it."""
    sys.path.insert(0, package)
    for finder in list(sys.meta_path):  # an editable install of this package answers before the path does
        spec = finder.find_spec("liger_kernel", None) if hasattr(finder, "find_spec") else None
        if spec is not None and not str(spec.origin).startswith(package):
            sys.meta_path.remove(finder)
    importlib.import_module("liger_kernel")
    for name in ("core/bench", "core/accuracy", "core/tensors", "cli/bench/clock", "cli/bench/memory"):
        load("liger_kernel." + name.replace("/", "."), root / f"{name}.py")
    for bench in benches(root):
        module = adopt(bench.parent.name, bench)
        for part in ("ref", "cases"):
            with contextlib.suppress(ImportError, FileNotFoundError):
                setattr(module, part, load(f"{module.__name__}.{part}", bench.with_name(f"{part}.py")))


def benches(root):
    """The bench.py files: those of the op folders and of chunked_loss."""
    return sorted([*(root / "ops").glob("*/bench.py"), *(root / "chunked_loss").glob("bench.py")])


def collect(root, config):
    """[(op, case)] of every bench.py that the configuration asks for."""
    found = []
    for path in benches(root):
        op = path.parent.name
        if config["ops"] and op not in config["ops"]:
            continue
        try:
            module = load(".".join(("liger_kernel", *path.relative_to(root).with_suffix("").parts)), path)
            found += [(op, case) for case in module.cases(config["device"]) if config["match"] in f"{op} {case.name}"]
        except Exception as e:  # noqa: BLE001 - whatever it is, it is reported and the rest still runs
            emit(event="failed", op=op, case="", contender="", error=f"bench.py: {type(e).__name__}: {e}")
    return found


def differentiated(result):
    """The outputs that backward starts from: the first alone when it is a scalar (a loss), else every one that trains."""
    import torch

    outputs = [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)]
    return outputs[:1] if outputs[0].dim() == 0 else [t for t in outputs if t.requires_grad]


def make_call(function, inputs, grad):
    """call(i): the function on input set i; with `grad`, backward to every input that trains."""
    import torch

    trained = [[t for t in s if isinstance(t, torch.Tensor) and t.requires_grad] for s in inputs]
    if not grad:
        return lambda i: function(*inputs[i])
    outputs = differentiated(function(*inputs[0]))
    upstream = [torch.ones_like(y) if y.dim() == 0 else torch.randn_like(y) for y in outputs]
    del outputs

    def call(i):
        outputs = differentiated(function(*inputs[i]))
        return outputs, torch.autograd.grad(outputs, trained[i], upstream, allow_unused=True)

    return call


def run_case(op, case, config, yardsticks):
    import torch

    clock = importlib.import_module("liger_kernel.cli.bench.clock")
    memory = importlib.import_module("liger_kernel.cli.bench.memory")
    device = config["device"]
    torch.manual_seed(0)
    inputs = [case.make()]
    size = sum(t.numel() * t.element_size() for t in inputs[0] if isinstance(t, torch.Tensor))
    inputs += [case.make() for _ in range(clock.input_sets(size, device) - 1)]
    contenders = {name: f for name, f in case.contenders.items() if not config["contenders"] or name in config["contenders"]}
    if config["compile"] and "eager" in contenders:
        torch._dynamo.reset()
        contenders["compile"] = torch.compile(contenders["eager"], dynamic=False)
    for grad in (False, True)[: 1 if case.forward_only else 2]:
        timers, peaks = {}, {}
        for name, function in contenders.items():
            try:
                call = make_call(function, inputs, grad)
                call(0)  # compiles, and fills caches that are not the call's own
                peaks[name] = memory.peak_extra(lambda call=call: call(0), device)
                timers[name] = clock.CpuTimer(call) if device == "cpu" else clock.CudaTimer(call, len(inputs))
            except Exception as e:  # noqa: BLE001 - whatever it is, it is reported and the rest still runs
                error = f"{PASSES[grad]}: {type(e).__name__}: {str(e)[:300]}"
                emit(event="failed", op=op, case=case.name, contender=name, error=error)
        gemm, gemm_flops, gemm_name = (
            case.yardstick() if case.yardstick else (yardsticks.gemm, yardsticks.gemm_flops, yardsticks.gemm_name))
        moved = case.forward_bytes + (case.backward_bytes if grad else 0)
        copy, copy_sets, copy_bytes = yardsticks.copy_of(moved)
        rulers = {"copy": (copy, copy_sets)} | ({"gemm": (gemm, 1)} if case.flops else {})
        rulers = {name: clock.CpuTimer(call) if device == "cpu" else clock.CudaTimer(call, sets) for name, (call, sets) in rulers.items()}
        turns = wait_for_turn if config["paired"] else lambda: None
        rounds = clock.interleave([*timers.values(), *rulers.values()], config["rounds"], turns)
        key = "wall_ms" if device == "cpu" else "kernel_ms"
        ruler_ms = {name: timer.result()[key]["median"] for name, timer in rulers.items()}
        emit(event="result", op=op, case=case.name, **{"pass": PASSES[grad]},
             bytes=moved, flops=case.flops if grad else 0,
             input_sets=len(inputs), rounds=rounds,
             copy_gb_s=copy_bytes / ruler_ms["copy"] / 1e6,
             gemm_tflop_s=gemm_flops / ruler_ms["gemm"] / 1e9 if case.flops else None,
             gemm=gemm_name if case.flops else None,
             contenders={name: timer.result() | {"peak_bytes": peaks[name]} for name, timer in timers.items()})


def main(config):
    root = pathlib.Path(config["root"])
    if config["package"]:
        stand_in(root, config["package"])
    sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != pathlib.Path(__file__).parent]
    import torch

    if config["device"] != "cpu":
        torch.cuda.set_device(config["device"])
    cases = collect(root, config)
    emit(event="plan", cases=len(cases))
    if not cases:
        return
    yardsticks = importlib.import_module("liger_kernel.cli.bench.clock").Yardsticks(config["device"])
    if config["device"] != "cpu":  # half a second of work brings the clocks to where a training step keeps them
        for _ in range(300):
            yardsticks.gemm(0)
        torch.cuda.synchronize()
    for op, case in cases:
        emit(event="start", op=op, case=case.name)
        try:
            run_case(op, case, config, yardsticks)
        except Exception as e:  # noqa: BLE001 - whatever it is, it is reported and the rest still runs
            emit(event="failed", op=op, case=case.name, contender="", error=f"{type(e).__name__}: {str(e)[:300]}")
        if config["device"] != "cpu":
            torch.cuda.empty_cache()
        emit(event="done", op=op, case=case.name)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
