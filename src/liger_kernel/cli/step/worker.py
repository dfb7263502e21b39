"""One arm of `liger bench step`, in a process of its own: builds the model, trains, measures. Reports by cli/child.py."""

import contextlib
import json
import resource
import statistics
import sys
import time

from liger_kernel.cli.child import emit

LEARNING_RATE = 1e-5
CPU_PROFILED = 3  # the wall clock of single operators is noisy: medians; kernel time on CUDA is not


def out_of_memory(error):
    """Whether an error, or what caused it, is that memory ran out."""
    while error is not None:
        text = f"{type(error).__name__}: {error}".lower()
        if "outofmemory" in text or "out of memory" in text or "can't allocate memory" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def build(config):
    """The model, on its device and in its dtype from the start: no fp32 copy ever exists."""
    import torch
    from transformers import AutoModelForCausalLM

    from liger_kernel.cli.step.configs import config_of

    torch.manual_seed(config["seed"])
    with torch.device(config["device"]):
        model = AutoModelForCausalLM.from_config(config_of(config["model"]), dtype=getattr(torch, config["dtype"]),
                                                 attn_implementation=config["attention"])
    model.train()
    if config["checkpointing"]:
        # transformers 5.24 renames the method.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if config["arm"] in ("patched", "fused"):
        from liger_kernel.patch import fuse_residual_norms, patch_model

        reports = [patch_model(model)] + ([fuse_residual_norms(model)] if config["arm"] == "fused" else [])
        emit(event="patched", report="\n".join(map(str, reports)))
    elif config["arm"] == "compile":
        if config["device"] == "cpu":
            torch._inductor.config.cpp.enable_kernel_profile = True  # names the fused loops in the profile
        model.compile(dynamic=False)
    return model


def state_bytes(model, *optimizers):
    """{weights, gradients, optimizer}: what a training step needs whatever its code. Gradients of all that trains count in full, also
    where the peak comes before they are made."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    states = [v for optimizer in optimizers for state in optimizer.state.values() for v in state.values() if hasattr(v, "element_size")]
    return {"weights": weights, "gradients": gradients, "optimizer": sum(t.numel() * t.element_size() for t in states)}


def peak_of_a_step(step, weights):
    """CPU: the largest sum of torch's allocations during one more step, without the gradients, which it makes."""
    import torch

    from liger_kernel.cli.bench.memory import peak_of

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    return max(0, peak_of(profile) - weights)


def main(config):
    import torch
    import transformers

    from liger_kernel.cli.demo.parts import marked
    from liger_kernel.cli.step import kinds

    transformers.logging.set_verbosity_error()
    device, cuda, compiled = config["device"], config["device"] != "cpu", config["arm"] == "compile"
    if cuda:
        torch.cuda.set_device(device)
    start = time.perf_counter()
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(config["seed"])
    count, profiled = config["warmup"] + config["steps"], 1 if cuda else CPU_PROFILED
    batches = torch.randint(vocab, (count + 1 + profiled, config["batch"], config["seq"]), generator=generator)
    emit(event="built", parameters=sum(p.numel() for p in model.parameters()), seconds=time.perf_counter() - start)

    def step(i):
        batch = batches[i].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)  # waits for the device

    losses, seconds = [], []
    for i in range(count):
        if cuda and i == config["warmup"]:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(step(i))
        seconds.append(time.perf_counter() - start)
        emit(event="step", step=i + 1, of=count, loss=losses[-1], seconds=seconds[-1])

    state = state_bytes(model, optimizer)
    if cuda:
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        above = allocated - sum(state.values())
    else:
        reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        above = peak_of_a_step(lambda: step(count), state["weights"])
        allocated = above + sum(state.values())
    timed = seconds[config["warmup"] :]
    emit(event="timed", losses=losses, seconds=seconds, median_s=statistics.median(timed), low_s=min(timed), high_s=max(timed),
         first_s=seconds[0], tokens_per_s=config["batch"] * config["seq"] / statistics.median(timed), state_bytes=state,
         peak_allocated=allocated, peak_reserved=reserved, peak_above_state=above)

    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    ranges = contextlib.nullcontext() if compiled else marked(model)
    tables = []
    with ranges:
        for i in range(count + 1, count + 1 + profiled):
            with torch.profiler.profile(activities=activities, record_shapes=compiled) as profile:
                step(i)
            tables.append(kinds.table(profile.events(), cuda, compiled, vocab))
    parts, kernels, moved = tables[-1]
    emit(event="profiled", parts_ms={name: statistics.median(t[0][name] for t in tables) / 1e3 for name in parts}, kernels=kernels,
         driver_copies=moved, parts_from="names" if compiled else "ranges")


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Exception as e:
        if not out_of_memory(e):
            raise
        emit(event="out of memory", error=str(e).strip().splitlines()[0][:300])
