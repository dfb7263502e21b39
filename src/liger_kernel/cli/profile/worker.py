"""One arm of `liger profile`, in a process of its own: builds the model, trains a few steps, profiles one. Reports by cli/child.py."""

import json
import statistics
import sys
import time

from liger_kernel.cli.child import emit
from liger_kernel.cli.step import worker as step_worker

CPU_PROFILED = step_worker.CPU_PROFILED


def load_weights(model, folder, entries, dtype):
    """Copies the weights of a transformers folder into a model that has been built (and patched: names stay)."""
    import torch
    from transformers import AutoModelForCausalLM

    from liger_kernel.cli.step.configs import config_of

    source = AutoModelForCausalLM.from_pretrained(folder, config=config_of(entries), dtype=getattr(torch, dtype), local_files_only=True)
    model.load_state_dict(source.state_dict())


def training(config):
    """(model, optimizer, vocabulary) of a worker's settings; reports "built"."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if config["device"] != "cpu":
        torch.cuda.set_device(config["device"])
    start = time.perf_counter()
    model = step_worker.build(config)
    if config.get("weights"):
        load_weights(model, config["weights"], config["model"], config["dtype"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=step_worker.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    emit(event="built", parameters=sum(p.numel() for p in model.parameters()), seconds=time.perf_counter() - start)
    return model, optimizer, model.config.get_text_config().vocab_size


def timed(losses, seconds, rates, warmup):
    """What "timed" says of every step's loss, seconds and tokens/s."""
    after = seconds[warmup:]
    return {"losses": losses, "seconds": seconds, "median_s": statistics.median(after), "low_s": min(after), "high_s": max(after),
            "tokens_per_s": statistics.median(rates[warmup:])}


def activities(cuda):
    import torch

    return [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda


def report_profiled(profile, tables, cuda, trace):
    """Emits "profiled": the medians of every profiled step's parts, and the last one's counts and timeline; writes that one's trace."""
    from liger_kernel.cli.profile import timeline
    from liger_kernel.cli.step.kinds import PARTS

    if trace:
        profile.export_chrome_trace(trace)
    _, kernels, moved = tables[-1]
    emit(event="profiled", parts_ms={name: statistics.median(parts[name] for parts, _, _ in tables) / 1e3 for name in PARTS},
         kernels=kernels, driver_copies=moved, **timeline.facts(profile.events(), cuda))


def main(config):
    import torch

    from liger_kernel.cli.demo.parts import marked
    from liger_kernel.cli.profile.phases import peaks_of_a_step
    from liger_kernel.cli.step import kinds

    device, cuda = config["device"], config["device"] != "cpu"
    model, optimizer, vocab = training(config)
    generator = torch.Generator().manual_seed(config["seed"])
    count, profiled = config["warmup"] + config["steps"], 1 if cuda else CPU_PROFILED
    batches = torch.randint(vocab, (count + 1 + profiled, config["batch"], config["seq"]), generator=generator)

    def step(i):
        batch = batches[i].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)  # waits for the device

    losses, seconds = [], []
    for i in range(count):
        start = time.perf_counter()
        losses.append(step(i))
        seconds.append(time.perf_counter() - start)
        emit(event="step", step=i + 1, loss=losses[-1], seconds=seconds[-1])
    emit(event="timed", **timed(losses, seconds, [config["batch"] * config["seq"] / s for s in seconds], config["warmup"]))

    state = step_worker.state_bytes(model, optimizer)
    peaks = peaks_of_a_step(model, optimizer, batches[count].to(device), state["weights"] + state["optimizer"])
    emit(event="memory", state_bytes=state, peak_bytes=peaks)

    tables = []
    with marked(model):
        for i in range(count + 1, count + 1 + profiled):
            with torch.profiler.profile(activities=activities(cuda)) as profile:
                step(i)
            tables.append(kinds.table(profile.events(), cuda, False, vocab))
            emit(event="profiling", step=i - count, of=profiled)
    report_profiled(profile, tables, cuda, config["trace"])


def guarded(main):
    """Runs a worker's main on its settings; memory that runs out is an event, not a failure."""
    try:
        main(json.loads(sys.argv[1]))
    except Exception as e:
        if not step_worker.out_of_memory(e):
            raise
        emit(event="out of memory", error=str(e).strip().splitlines()[0][:300])


if __name__ == "__main__":
    guarded(main)
