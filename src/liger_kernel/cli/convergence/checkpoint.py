"""A training run's state on disk: weights and AdamW's moments, in parts of limited size, replaced as a whole or not at all."""

import json
import os
import pathlib
import shutil

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("full", "compact", "none")  # bytes a parameter: 12 in fp32; 8 with the moments in bf16; nothing


def bytes_of(parameters, kind):
    """Bytes of one arm's checkpoint."""
    return parameters * {"full": 12, "compact": 8, "none": 0}[kind]


def _write(path, text):
    partial = path.with_suffix(".part")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _tensors(model, optimizer, compact):
    """(name, tensor) of everything that training goes on from."""
    import torch

    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        for moment in MOMENTS:
            if moment in optimizer.state.get(parameter, {}):
                value = optimizer.state[parameter][moment]
                yield f"{moment}:{name}", value.to(torch.bfloat16) if compact else value


def save(folder, step, model, optimizer, compact=False, part_bytes=1 << 30):
    """Writes the state of `step` and takes the earlier one away. A reader sees the one or the other, whenever this is interrupted."""
    import torch

    folder = pathlib.Path(folder)
    new = folder / f"step-{step}"
    partial = folder / f"step-{step}.part"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    part, size, parts = {}, 0, 0

    def flush():
        nonlocal part, size, parts
        if part:
            torch.save(part, partial / f"part-{parts:03d}.pt")
        part, size, parts = {}, 0, parts + bool(part)

    for name, tensor in _tensors(model, optimizer, compact):
        count = tensor.numel() * tensor.element_size()
        if part and size + count > part_bytes:
            flush()
        part[name] = tensor.cpu().clone()
        size += count
    flush()
    shutil.rmtree(new, ignore_errors=True)
    os.replace(partial, new)
    _write(folder / "state.json", json.dumps({"step": step, "parts": parts, "compact": compact}) + "\n")
    for other in folder.glob("step-*"):
        if other != new:
            shutil.rmtree(other, ignore_errors=True)


def step_of(folder):
    """The step that a checkpoint stands at; 0 where there is none."""
    path = pathlib.Path(folder) / "state.json"
    return json.loads(path.read_text())["step"] if path.exists() else 0


def load(folder, model, optimizer):
    """Puts the newest state into a model and its AdamW; the step, 0 where there is none.

    Raises:
        ValueError: the checkpoint is of another model, or parts of it are missing.
    """
    import torch

    folder = pathlib.Path(folder)
    step = step_of(folder)
    if not step:
        return 0
    facts, state = json.loads((folder / "state.json").read_text()), {}
    for i in range(facts["parts"]):
        path = folder / f"step-{step}" / f"part-{i:03d}.pt"
        if not path.exists():
            raise ValueError(f"{path} is missing; the checkpoint has {facts['parts']} parts")
        state |= torch.load(path, map_location="cpu", weights_only=True)
    for name, parameter in model.named_parameters():
        if name not in state or state[name].shape != parameter.shape:
            raise ValueError(f"the checkpoint in {folder} is of another model: {name} differs")
        with torch.no_grad():
            parameter.copy_(state[name])
        own = {moment: state[f"{moment}:{name}"].to(parameter) for moment in MOMENTS if f"{moment}:{name}" in state}
        if own:
            optimizer.state[parameter] = own | {"step": torch.tensor(float(step), device=parameter.device)}
    return step
