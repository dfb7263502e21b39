"""Where a training step's time goes, by part of the model, from torch.profiler.

Forward: hooks open a range named after the part around its modules and around the rotation; an operator belongs to the
innermost range. Backward: autograd numbers the nodes that a thread makes, and the profiler reports the same number and thread
for the forward operator that made a node and for the node's run, so backward work is booked on the part that caused it.
Recomputation under gradient checkpointing opens the ranges again. The time is that of the operators themselves: by the wall
clock on the CPU, kernel time on CUDA.
"""

import contextlib
import sys

PARTS = ("attention", "norms", "rope", "MLP", "head + loss", "optimizer", "other")
PREFIX = "part: "
BACKWARD = "autograd::engine::evaluate_function"
ROTATIONS = "apply_rotary_pos_emb"


def part_of(name):
    """The part that a module of a transformers model opens, or None."""
    last = name.rpartition(".")[2]
    if name == "":
        return "head + loss"  # the model around its decoder: lm_head and loss, fused or not
    if last == "model":
        return "other"  # embedding and residual additions
    if last.endswith("norm"):
        return "norms"
    return {"self_attn": "attention", "mlp": "MLP", "rotary_emb": "rope"}.get(last)


@contextlib.contextmanager
def marked(model):
    """Ranges around the model's parts while the context lasts."""
    import torch

    def opens(part):
        stack = []

        def before(module, args):
            stack.append(torch.profiler.record_function(PREFIX + part))
            stack[-1].__enter__()

        def after(module, args, output):
            stack.pop().__exit__(None, None, None)

        return before, after

    handles = []
    for name, module in model.named_modules():
        part = part_of(name)
        if part:
            before, after = opens(part)
            handles.append(module.register_forward_pre_hook(before))
            # Recomputation stops by an exception once it has what backward needs; the range must close all the same.
            handles.append(module.register_forward_hook(after, always_call=True))
    modeling = sys.modules[type(model).__module__]
    rotations = {name: f for name, f in vars(modeling).items() if name.startswith(ROTATIONS) and callable(f)}

    def mark(rotate):
        def marked_rotate(*args, **kwargs):
            with torch.profiler.record_function(PREFIX + "rope"):
                return rotate(*args, **kwargs)

        return marked_rotate

    for name, rotate in rotations.items():
        setattr(modeling, name, mark(rotate))
    try:
        yield
    finally:
        for name, rotate in rotations.items():
            setattr(modeling, name, rotate)
        for handle in handles:
            handle.remove()


def attributed(events):
    """[(CPU event, its part)] of a profile's events."""
    from torch.autograd import DeviceType

    events = sorted((e for e in events if e.device_type == DeviceType.CPU), key=lambda e: e.time_range.start)

    def home(event):
        """The range above an event, else the thread and number of the backward node that it runs in."""
        while event is not None:
            if event.name.startswith(PREFIX):
                return event.name[len(PREFIX) :], None
            if event.name.startswith("Optimizer."):
                return "optimizer", None
            if event.name.startswith(BACKWARD):
                return None, (event.fwd_thread, event.sequence_nr)
            event = event.cpu_parent
        return "other", None

    homes = [home(e) for e in events]
    # An operator also reports the number when it makes no node; the one that does is the last to report it.
    pairs = zip(events, homes, strict=True)
    owner = {(e.thread, e.sequence_nr): part for e, (part, _) in pairs if part and e.sequence_nr >= 0}
    return [(e, part or owner.get(node, "other")) for e, (part, node) in zip(events, homes, strict=True)]


def by_part(events, cuda):
    """{part: microseconds} of a profile's events."""
    total = dict.fromkeys(PARTS, 0.0)
    for event, part in attributed(events):
        total[part] += event.self_device_time_total if cuda else event.self_cpu_time_total
    return total
