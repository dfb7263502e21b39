"""Most memory that a call held at once above what existed before it: its results, what it saved and its scratch."""

import torch


def peak_extra(call, device):
    """Bytes. CUDA: the caching allocator's peak. CPU: the running sum of torch's allocations and releases, from the profiler
    (memory that a library takes from malloc by itself, such as MKL's GEMM buffers, is not in it)."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
        del result
    return peak_of(profile)


def peak_of(profile):
    """Largest running sum of a CPU profile's memory events."""
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak
