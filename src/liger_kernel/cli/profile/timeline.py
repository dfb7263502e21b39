"""What a profiled step says besides the time of its parts: operators called, kernels launched, and how long the device waited."""

import re

from liger_kernel.cli.step.kinds import RANGES

LAUNCH = re.compile(r"^(cudaLaunch|cuLaunch|cudaGraphLaunch)")


def gaps(spans, begin):
    """Time that no span covers, from `begin` to the end of the last one.

    Args:
        spans: [(start, end)], which may overlap.

    Returns:
        {"span": whole, "idle": not covered, "gaps": how many, "longest": the longest of them}, in the unit of `spans`.
    """
    reached, waited = begin, []
    for start, end in sorted(spans):
        if start > reached:
            waited.append(start - reached)
        reached = max(reached, end)
    return {"span": reached - begin, "idle": sum(waited), "gaps": len(waited), "longest": max(waited, default=0)}


def operators(events):
    """Operators that Python or autograd called; those that an operator calls in turn do not count."""
    def is_operator(event):
        return "::" in event.name and not event.name.startswith("autograd::")

    def inside(event):
        above = event.cpu_parent
        while above is not None and not is_operator(above):
            above = above.cpu_parent
        return above is not None

    return sum(is_operator(e) and not inside(e) for e in events)


def facts(events, cuda):
    """{"operators", "launches", "idle"} of one step's profile events; the last two are None on the CPU, which has no device to wait.

    "idle" is `gaps` in ms, from the step's first operator to the end of the device's last work: copies count as work.
    """
    from torch.autograd import DeviceType

    on_cpu = [e for e in events if e.device_type == DeviceType.CPU]
    found = {"operators": operators(on_cpu), "launches": None, "idle": None}
    if cuda:
        work = [e for e in events if e.device_type == DeviceType.CUDA
                and not getattr(e, "is_user_annotation", False) and not e.name.startswith(RANGES)]
        measured = gaps([(e.time_range.start, e.time_range.end) for e in work], min(e.time_range.start for e in on_cpu))
        found["launches"] = sum(bool(LAUNCH.match(e.name)) for e in on_cpu)
        found["idle"] = {"span_ms": measured["span"] / 1e3, "idle_ms": measured["idle"] / 1e3, "gaps": measured["gaps"],
                         "longest_ms": measured["longest"] / 1e3}
    return found
