"""`liger doctor`: what is installed, which variant of every op runs on each device, what is missing and how to get it."""

import importlib.util
import os

from rich.table import Table

from liger_kernel import env_report
from liger_kernel.cli import record

SAMPLE = 256  # every extent of the shape that an op is asked about


def sample_shape(text):
    """A shape for an op's description such as "rows x columns"."""
    return [SAMPLE] * len(text.split(" x "))


def chosen(native, op, shape, dtype, device):
    """ "forward cpu_avx2, backward cpu_avx2" as this machine chooses, or why the op does not answer."""
    try:
        rows, _ = native.explain(op, sample_shape(shape), dtype, device)
    except ValueError as e:
        return str(e)
    passes = {}
    for pass_name, variant, mark, _ in rows:
        passes.setdefault(pass_name, None)
        if mark == "chosen":
            passes[pass_name] = variant
    return ", ".join(f"{p} {v or '[red]none[/]'}" for p, v in passes.items())


def self_check(device):
    """Runs one op forward and backward and compares; the error's text, or None."""
    import torch

    from liger_kernel.ops.rms_norm import rms_norm
    from liger_kernel.ops.rms_norm.ref import reference

    results = []
    for function in (rms_norm, reference):
        torch.manual_seed(0)
        x = torch.randn(5, 96, device=device, requires_grad=True)
        w = torch.randn(96, device=device, requires_grad=True)
        y = function(x, w)
        results.append((y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))))
    try:
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    except AssertionError as e:
        return str(e)
    return None


def advice(native, torch):
    """[(what is missing, how to get it)]: nothing here stops the library from working."""
    missing = []
    if importlib.util.find_spec("transformers") is None:
        missing.append(("transformers: models cannot be patched", "pip install 'transformers>=4.52'"))
    for name, use in (("matplotlib", "plots of `liger demo`"), ("tokenizers", "`liger demo`")):
        if importlib.util.find_spec(name) is None:
            missing.append((f"{name}: {use}", "pip install liger-kernel[cli]"))
    driver, _ = env_report.cuda_driver()
    if torch.cuda.is_available():
        try:
            native.machine(0)
        except ValueError as e:
            missing.append((f"CUDA kernels: {e}", "rebuild with nvcc on PATH: LIGER_CUDA=ON pip install --no-build-isolation ."))
        for i in range(torch.cuda.device_count()):
            if torch.cuda.get_device_capability(i) < (8, 0):
                name = torch.cuda.get_device_name(i)
                missing.append((f"{name} is older than SM 8.0: its tensors are refused", "use the CPU or a newer GPU"))
    elif driver and torch.version.cuda:
        missing.append((f"CUDA is not usable from torch (torch {torch.version.cuda}, driver {driver})",
                        "install a torch for this driver, or check CUDA_VISIBLE_DEVICES and the device files"))
    elif driver:
        missing.append(("the driver is there, but this torch has no CUDA",
                        "install a CUDA build of torch: https://pytorch.org/get-started"))
    return missing


def run():
    """Prints the report; 0 unless the library cannot be used."""
    console = record.console()
    try:
        import torch
    except ImportError as e:
        console.print(f"[red]broken[/]: torch cannot be imported ({e}). Install torch >= 2.10 first.", highlight=False)
        return 1
    table = Table("", "", show_header=False, title="Environment", title_justify="left")
    for name, value in env_report.facts().items():
        table.add_row(name, value)
    broken = []
    version = tuple(int("".join(c for c in p if c.isdigit()) or 0) for p in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 10):
        broken.append((f"torch {torch.__version__} is too old for the library's ABI", "pip install 'torch>=2.10'"))
    try:
        from liger_kernel import _native as native
    except (ImportError, OSError) as e:
        console.print(table)
        broken.append((f"the native library does not load: {e}", "pip install --no-build-isolation . in the source tree"))
        return finish(console, broken, [])

    table.add_row("Native library", native.PATH)
    table.add_row("Kernels see", native.machine())
    devices = {"cpu": -1}
    for i in range(torch.cuda.device_count()):
        try:
            table.add_row(f"Kernels see cuda:{i}", native.machine(i))
            devices[f"cuda:{i}"] = i
        except ValueError as e:
            table.add_row(f"Kernels see cuda:{i}", str(e))
    forced = {k: v for k, v in os.environ.items() if k.startswith("LIGER_") and v}
    if forced:
        table.add_row("LIGER_ variables", ", ".join(f"{k}={v}" for k, v in sorted(forced.items())))
    console.print(table)

    columns = [f"{d} {t}" for d in devices for t in ("fp32", "bf16")]
    table = Table("op", *columns, title="Which variant runs (contiguous, 256 in every extent)", title_justify="left")
    for op, shape, _ in native.list_ops():
        table.add_row(op, *(chosen(native, op, shape, t, index) for index in devices.values() for t in ("fp32", "bf16")))
    console.print(table)

    for device in devices:
        try:
            error = self_check(device)
        except Exception as e:  # noqa: BLE001 - whatever it is, it is reported and the rest still runs
            error = f"{type(e).__name__}: {e}"
        if error:
            broken.append((f"rms_norm on {device} is wrong: {error}", "report this with the text above"))
    return finish(console, broken, advice(native, torch))


def finish(console, broken, missing):
    """Prints the verdict and returns the exit code."""
    for what, how in missing:
        console.print(f"[yellow]missing[/] {what}\n        {how}", highlight=False)
    for what, how in broken:
        console.print(f"[red]broken[/] {what}\n        {how}", highlight=False)
    if not broken:
        console.print("[green]The kernels work.[/]")
    return 1 if broken else 0
