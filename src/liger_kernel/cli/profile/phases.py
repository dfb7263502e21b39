"""Peak memory of a training step by phase: forward (to the last hidden state), loss (head and loss), backward, optimizer.

CUDA: the caching allocator's peak, reset where a phase begins; it counts when memory is asked for, so nothing waits for the device.
CPU: the running sum of torch's allocations and releases, from the profiler (memory that a library takes from malloc by itself is
not in it), above what stood before the step.
"""

PHASES = ("forward", "loss", "backward", "optimizer")
PREFIX = "phase: "



def peaks_of_events(changes, spans, before):
    """{phase: most bytes held during it}.

    Args:
        changes: [(ns, bytes)]: allocations (positive) and releases.
        spans: [(phase, first ns, last ns)], one after the other; a phase may come again.
        before: bytes held when the step began.
    """
    peaks, total, changes = {}, before, sorted(changes, key=lambda change: change[0])
    position = 0
    for name, first, last in sorted(spans, key=lambda span: span[1]):
        while position < len(changes) and changes[position][0] < first:
            total += changes[position][1]
            position += 1
        peaks[name] = max(peaks.get(name, 0), total)
        while position < len(changes) and changes[position][0] <= last:
            total += changes[position][1]
            position += 1
            peaks[name] = max(peaks[name], total)
    return peaks


class Phases:
    """Follows one step: a context in which `turn(name)` begins a phase."""

    def __init__(self, cuda):
        import torch

        self.cuda, self.name, self.range, self.found = cuda, None, None, {}
        self.recording = None if cuda else torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self):
        if self.recording is not None:
            self.recording.__enter__()
        return self

    def __exit__(self, *error):
        self.turn(None)
        if self.recording is not None:
            self.recording.__exit__(*error)

    def turn(self, name):
        """Ends the phase that lasts and begins `name`, which may have been before."""
        import torch

        if self.cuda:
            if self.name:
                self.found[self.name] = max(self.found.get(self.name, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        else:
            if self.range:
                self.range.__exit__(None, None, None)
            self.range = torch.profiler.record_function(PREFIX + name) if name else None
            if self.range:
                self.range.__enter__()
        self.name = name

    def peaks(self, before):
        """{phase: most bytes allocated during it}, once the step is over; `before` it so many were. On CUDA the allocator knows."""
        if self.cuda:
            return self.found
        changes, spans = [], []
        for event in self.recording.profiler.kineto_results.events():
            if event.name() == "[memory]":
                changes.append((event.start_ns(), event.nbytes()))
            elif event.name().startswith(PREFIX):
                spans.append((event.name()[len(PREFIX) :], event.start_ns(), event.start_ns() + event.duration_ns()))
        return peaks_of_events(changes, spans, before)


def decoder_of(model):
    """The part of a causal language model before its head; None where it names none, so that the loss counts for "forward"."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return None if decoder is model else decoder


def peaks_of_a_step(model, optimizer, batch, before):
    """{phase: most bytes allocated during it} of one training step on `batch` (token ids, which are the labels too).

    Args:
        model: a transformers causal language model.
        before: bytes held before the step: weights and optimizer states. On CUDA the allocator knows, and it is not read.
    """
    decoder = decoder_of(model)
    with Phases(batch.is_cuda) as phases:
        hook = decoder.register_forward_hook(lambda *_: phases.turn("loss")) if decoder is not None else None
        try:
            phases.turn("forward")
            loss = model(input_ids=batch, labels=batch).loss
            phases.turn("backward")
            loss.backward()
            phases.turn("optimizer")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        finally:
            if hook is not None:
                hook.remove()
    return phases.peaks(before)
