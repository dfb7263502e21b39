"""One training run of the demo, in a process of its own: as transformers ships it, or patched. Reports by cli/child.py."""

import json
import resource
import statistics
import sys
import time

from liger_kernel.cli.child import emit

PROFILED = 5  # steps after the timed ones


def build(config, device, dtype):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, config["hidden"] // config["head_dim"])
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=config["vocab"], hidden_size=config["hidden"], intermediate_size=-(-config["hidden"] * 8 // 3 // 64) * 64,
        num_hidden_layers=config["layers"], num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
        head_dim=config["head_dim"], max_position_embeddings=config["seq"], tie_word_embeddings=False, use_cache=False,
        attn_implementation="sdpa"))
    # By name, so that both runs start from the same numbers however their modules are made.
    generator = torch.Generator().manual_seed(config["seed"])
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model.to(device=device, dtype=dtype).train()


def state_bytes(model, optimizer):
    """Parameters, their gradients and the optimizer's state."""
    tensors = [p for p in model.parameters() for _ in range(2)]
    tensors += [v for state in optimizer.state.values() for v in state.values() if hasattr(v, "element_size")]
    return sum(t.numel() * t.element_size() for t in tensors)


def main(config):
    import torch

    from liger_kernel.cli.bench.memory import peak_of
    from liger_kernel.cli.demo import parts

    device, cuda = config["device"], config["device"] != "cpu"
    if cuda:
        torch.cuda.set_device(device)
    if config["patched"]:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model = build(config, device, torch.bfloat16 if cuda else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    tokens = torch.load(config["tokens"])
    generator = torch.Generator().manual_seed(config["seed"])
    spans = torch.randint(len(tokens) - config["seq"], (config["steps"] + PROFILED, config["batch"]), generator=generator)
    batches = [torch.stack([tokens[s : s + config["seq"]] for s in row]).long().to(device) for row in spans]

    def step(batch):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses, seconds = [], []
    for i in range(config["steps"]):
        if cuda and i == config["warmup"]:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(float(step(batches[i])))  # waits for the device
        seconds.append(time.perf_counter() - start)
        emit(event="step", step=i + 1, loss=losses[-1], seconds=seconds[-1])

    # Memory and time by part come from further steps, so that the profiler disturbs no timed one.
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    state = state_bytes(model, optimizer)
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    if cuda:
        peak = torch.cuda.max_memory_allocated() - state
    else:
        gradients = sum(p.numel() * p.element_size() for p in model.parameters())
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            step(batches[config["steps"]])
        peak = peak_of(profile) - gradients  # gradients are part of the state, and are made during the step
    profiled = []
    with parts.marked(model):
        for batch in batches[config["steps"] :]:
            with torch.profiler.profile(activities=activities) as profile:
                float(step(batch))
            profiled.append(parts.by_part(profile.events(), cuda))
    timed = seconds[config["warmup"] :]
    emit(event="result", losses=losses, seconds=seconds, median_s=statistics.median(timed), low_s=min(timed), high_s=max(timed),
         tokens_per_s=config["batch"] * config["seq"] / statistics.median(timed), state_bytes=state, peak_bytes=peak, peak_rss=peak_rss,
         parts_ms={name: statistics.median(one[name] for one in profiled) / 1e3 for name in parts.PARTS},
         parameters=sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
