"""Peak memory of a training step by phase: forward (to the last hidden state), loss (head and loss), backward, optimizer.

CUDA: the caching allocator's peak, reset where a phase begins; it counts when memory is asked for, so nothing waits for the device.
CPU: the running sum of torch's allocations and releases, from the profiler (memory that a library takes from malloc by itself is
not in it), above what stood before the step.
"""

import contextlib

PHASES = ("forward", "loss", "backward", "optimizer")
PREFIX = "phase: "


@contextlib.contextmanager
def _cuda_phase(name, peaks):
    import torch

    torch.cuda.reset_peak_memory_stats()
    yield
    peaks[name] = torch.cuda.max_memory_allocated()


def peaks_of_events(changes, spans, before):
    """{phase: most bytes held during it}.

    Args:
        changes: [(ns, bytes)]: allocations (positive) and releases.
        spans: {phase: (first ns, last ns)}, one after the other.
        before: bytes held when the step began.
    """
    peaks, total, changes = dict.fromkeys(spans, 0), before, sorted(changes, key=lambda change: change[0])
    position = 0
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        while position < len(changes) and changes[position][0] < first:
            total += changes[position][1]
            position += 1
        peaks[name] = total
        while position < len(changes) and changes[position][0] <= last:
            total += changes[position][1]
            position += 1
            peaks[name] = max(peaks[name], total)
    return peaks


def _cpu_events(profile):
    changes, spans = [], {}
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(PREFIX):
            spans[event.name()[len(PREFIX) :]] = (event.start_ns(), event.start_ns() + event.duration_ns())
    return changes, spans


def peaks_of_a_step(model, optimizer, batch, before):
    """{phase: most bytes allocated during it} of one training step on `batch` (token ids, which are the labels too).

    Args:
        model: a transformers causal language model; without a decoder of its own the loss counts for "forward".
        before: bytes held before the step: weights and optimizer states. On CUDA the allocator knows, and it is not read.
    """
    import torch

    cuda, peaks, current = batch.is_cuda, {}, []

    def turn(name=None):
        if current:
            current.pop().__exit__(None, None, None)
        if name:
            current.append(_cuda_phase(name, peaks) if cuda else torch.profiler.record_function(PREFIX + name))
            current[-1].__enter__()

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    hook = decoder.register_forward_hook(lambda *_: turn("loss")) if decoder is not None and decoder is not model else None
    recording = contextlib.nullcontext()
    if not cuda:
        recording = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    try:
        with recording as profile:
            turn("forward")
            loss = model(input_ids=batch, labels=batch).loss
            turn("backward")
            loss.backward()
            turn("optimizer")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            turn()
    finally:
        if hook is not None:
            hook.remove()
    return peaks if cuda else peaks_of_events(*_cpu_events(profile), before)
