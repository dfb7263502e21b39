"""What a bug report needs: versions of everything that takes part. `python -m liger_kernel.env_report` prints it."""

import ctypes
import importlib.metadata
import pathlib
import platform
import sys

PACKAGES = ("liger-kernel", "torch", "transformers", "triton", "numpy", "trl", "peft", "accelerate")


def package_version(name):
    """Installed version, or None. liger-kernel falls back to the imported package's own number (a source tree)."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name == "liger-kernel":
            from liger_kernel import __version__

            return __version__
        return None


def cuda_driver():
    """(driver's CUDA version as "13.2", NVIDIA release as "595.71.05"), each None where unknown. Creates no CUDA context."""
    version = ctypes.c_int()
    try:
        ok = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    except OSError:
        ok = False
    release = None
    module = pathlib.Path("/proc/driver/nvidia/version")
    if module.exists():
        words = module.read_text().split()
        release = next((w for w in words if w[:1].isdigit() and "." in w), None)
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if ok else None, release


def cpu_name():
    """The CPU's model name, or the architecture where the system does not say."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def facts():
    """{what: value as text} in the order in which it is printed."""
    import torch

    driver, release = cuda_driver()
    rows = {"Operating system": platform.platform(), "Python": platform.python_version(), "CPU": cpu_name()}
    rows |= {name: package_version(name) or "not installed" for name in PACKAGES}
    rows["CUDA of torch"] = torch.version.cuda or "none"
    rows["CUDA driver"] = f"{driver} (release {release or 'unknown'})" if driver else "none"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows["CUDA devices"] = ", ".join(devices) or "none"
    return rows


def print_env_report():
    """Prints operating system, Python, package, torch, CUDA, Triton and transformers versions."""
    print("Environment report:\n-------------------")
    for name, value in facts().items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    print_env_report()
    sys.exit(0)
