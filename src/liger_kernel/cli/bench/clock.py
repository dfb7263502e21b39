"""Interleaved timing of contenders: one sample of each a round, in a new order every round, so that drift and what a
neighbour leaves behind (its caches, its threads still spinning) meet all alike.

A contender is prepared as `call(i)`, which runs once on input set i. CPU samples give wall time, CPU time of all threads and
page faults per call. CUDA samples give kernel time: the calls are captured into a CUDA graph over all input sets (which
together exceed L2) and replayed between two events; calls long enough to hide their launches are timed without a graph.
"""

import random
import resource
import statistics
import time

import torch

GRAPH_BELOW_MS = 5.0  # longer calls keep the queue full by themselves
CPU_SAMPLE_S = 0.02
SETTLE_S = 0.005  # OpenMP's threads spin this long after the previous contender, and would count as this one's CPU time
CUDA_SAMPLE_MS = 4.0
BUDGET_S = 30  # one shape, one pass, all contenders


def summary(samples):
    """Median with the 10th and 90th percentile."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {"median": statistics.median(ordered), "low": ordered[round(0.1 * last)], "high": ordered[round(0.9 * last)]}


class CpuTimer:
    """Times one contender on the CPU."""

    sets = 1

    def __init__(self, call):
        self.call = call
        call(0)
        start = time.perf_counter()
        call(0)
        self.repeats = max(1, min(2000, int(CPU_SAMPLE_S / max(time.perf_counter() - start, 1e-7))))
        self.samples = {"wall_ms": [], "cpu_ms": [], "page_faults": []}

    def sample(self):
        time.sleep(SETTLE_S)
        self.call(0)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(self.repeats):
            self.call(0)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        for key, value in (("wall_ms", wall * 1e3), ("cpu_ms", cpu * 1e3), ("page_faults", faults)):
            self.samples[key].append(value / self.repeats)

    def result(self):
        return {key: summary(values) for key, values in self.samples.items()}


class CudaTimer:
    """Times one contender on CUDA over `sets` input sets."""

    def __init__(self, call, sets):
        self.call, self.sets = call, sets
        self.start, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.graph = None
        for i in range(sets):
            call(i)
        once = self._events(self._calls) / sets
        if once < GRAPH_BELOW_MS:
            self._capture()
        self.repeats = max(1, round(CUDA_SAMPLE_MS / max(once * sets, 1e-3)))
        self.samples = {"kernel_ms": [], "wall_ms": []}

    def _calls(self):
        for i in range(self.sets):
            self.call(i)

    def _events(self, work):
        torch.cuda.synchronize()
        self.start.record()
        work()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end)

    def _capture(self):
        """The results stay alive until the capture ends, so that every call writes to memory of its own."""
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.call(0)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [self.call(i) for i in range(self.sets)]
            del results
            self.graph = graph
        except RuntimeError:  # work that cannot be captured is timed with its launches
            torch.cuda.synchronize()

    def sample(self):
        run = self.graph.replay if self.graph else self._calls
        self.samples["kernel_ms"].append(self._events(lambda: [run() for _ in range(self.repeats)]) / (self.repeats * self.sets))
        # As a training loop sees it, with launches.
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._calls()
        torch.cuda.synchronize()
        self.samples["wall_ms"].append((time.perf_counter() - start) * 1e3 / self.sets)

    def result(self):
        return {key: summary(values) for key, values in self.samples.items()} | {"method": "graph" if self.graph else "events"}


def interleave(timers, rounds, before_round=lambda: None):
    """Takes `rounds` samples of every timer, fewer (3 at least) when they last longer than BUDGET_S; returns how many."""
    order, start = random.Random(0), time.monotonic()
    for done in range(rounds):
        if done >= 3 and time.monotonic() - start > BUDGET_S:
            return done
        before_round()
        for timer in order.sample(timers, len(timers)):
            timer.sample()
    return rounds


def input_sets(bytes_per_set, device):
    """How many input sets CUDA rotates through: together four times L2, at most 32 and a quarter of the free memory."""
    if device == "cpu":
        return 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    free, _ = torch.cuda.mem_get_info(device)
    fits = max(1, int(free / 4 / max(bytes_per_set, 1)))
    return max(1, min(fits, 32, max(2, -(-4 * l2 // max(bytes_per_set, 1)))))


class Yardsticks:
    """The machine's own rates, sampled among the contenders: a copy between standing buffers, and a square GEMM."""

    def __init__(self, device):
        cuda = device != "cpu"
        count = (1 << 28) if cuda else (1 << 24)  # fp32: 1 GiB, 64 MiB
        source, target = torch.ones(count, device=device), torch.empty(count, device=device)
        self.source, self.target, self.cuda = source, target, cuda
        n = 8192 if cuda else 1024
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16 if cuda else torch.float32) for _ in range(2))
        c = torch.empty_like(a)
        self.gemm_flops = 2 * n**3
        self.gemm_name = f"{n}^3 {'bf16' if cuda else 'fp32'}"
        self.gemm = lambda _: torch.mm(a, b, out=c)

    def copy_of(self, moved):
        """(call, input sets, bytes moved by a call) of a copy that moves as many bytes as the case does: a kernel's start and end
        cost a short copy as much of its bandwidth as they cost the op. On the CPU always the whole buffer."""
        if not self.cuda:
            return lambda _: self.target.copy_(self.source), 1, 8 * self.source.numel()
        count = min(max(moved // 8, 1 << 22), self.source.numel())
        pairs = list(zip(self.source.split(count), self.target.split(count), strict=True))[: self.source.numel() // count]

        def call(i):  # a kernel that reads and writes: a captured copy_ becomes a copy-engine node at two thirds of the bandwidth
            torch.neg(pairs[i][0], out=pairs[i][1])

        return call, len(pairs), 8 * count
