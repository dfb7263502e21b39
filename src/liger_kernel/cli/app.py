"""The Typer application: options and help. Each command imports its work when it runs, so that `liger --help` is immediate."""

import pathlib
from typing import Annotated

import typer
import typer.core

from liger_kernel.cli import require
from liger_kernel.cli.options import check_from, refuse, refuse_all_but

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fused training kernels: what runs here, why, and how fast.")

Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto takes the first CUDA device, else the CPU.")]
Json = Annotated[pathlib.Path | None, typer.Option(dir_okay=False, help="Write every number to this file.")]
Plots = Annotated[pathlib.Path | None, typer.Option(file_okay=False, help="Draw the numbers into this folder.")]
From = Annotated[pathlib.Path | None, typer.Option("--from", help="Show a file that --json wrote instead of measuring.")]


def pick_device(device):
    """A torch device string for "auto", "cpu", "cuda" or "cuda:N"; BadParameter for a device that is not there."""
    import torch

    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise typer.BadParameter(f"{device!r} is no device; use cpu, cuda or cuda:N")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if int(index or 0) >= count:
            raise typer.BadParameter(f"{device} is not there: PyTorch sees {count} CUDA device(s); `liger doctor` says more")
        return f"cuda:{int(index or 0)}"
    return kind


def _version(wanted: bool):
    if wanted:
        from liger_kernel._version import __version__

        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and end.")] = False,
):
    pass


@app.command()
def doctor():
    """Say what is installed, which kernels run here, and what is missing. Exit code 1 when the library does not work."""
    from liger_kernel.cli import doctor

    raise typer.Exit(doctor.run())


@app.command()
def ops():
    """List the ops of this build and their variants, best first."""
    from liger_kernel.cli import explain

    explain.show_ops()


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="As `liger ops` prints it, e.g. rms_norm.")],
    shape: Annotated[str, typer.Argument(help="Numbers joined by x, e.g. 8192x4096.")],
    dtype: Annotated[str, typer.Argument(help="fp32, bf16 or fp16.")] = "bf16",
    device: Annotated[str, typer.Argument(help="cpu, cuda or cuda:N.")] = "auto",
):
    """Say which variant of an op runs for a shape, and why the others do not."""
    from liger_kernel.cli import explain

    raise typer.Exit(explain.show(op, shape, dtype, pick_device(device)))


@app.command()
def models(
    types: Annotated[list[str] | None, typer.Argument(help="Model types, e.g. llama qwen3; one of each row when left out.")] = None,
    device: Device = "auto",
    json: Json = None,
):
    """Patch tiny random models: what is replaced, what is left and why, how far the numbers move. Exit code 1 when they move too far."""
    require("transformers", purpose="liger models")
    from liger_kernel.cli import models

    raise typer.Exit(models.run(types or [], pick_device(device), json))


class BenchGroup(typer.core.TyperGroup):
    """`liger bench NAME...` is `liger bench ops NAME...` unless NAME is another command of the group."""

    def parse_args(self, ctx, args):
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["ops", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(cls=BenchGroup, help="Time ops (the word ops may be left out: `liger bench rms_norm`) or whole training steps.")
app.add_typer(bench, name="bench")


@bench.command("ops")
def bench_ops(
    context: typer.Context,
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to time; all that have a bench.py when left out.")] = None,
    device: Device = "auto",
    match: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved samples of each contender.")] = 15,
    compile: Annotated[bool, typer.Option(help="Also time torch.compile of the eager code.")] = True,
    heap: Annotated[str, typer.Option(help="CPU memory: warm keeps freed pages, default is malloc as it ships, both times both.")] = "both",
    against: Annotated[pathlib.Path | None, typer.Option(file_okay=False, help="Folder of another package with a liger_kernel.")] = None,
    json: Json = None,
    plots: Plots = None,
    source: From = None,
):
    """Time the ops against eager PyTorch, torch.compile and PyTorch's own op, forward and forward+backward."""
    from liger_kernel.cli.bench import run, show_file

    if heap not in ("warm", "default", "both"):
        raise typer.BadParameter(f"--heap is {heap!r}, expected warm, default or both")
    if against is not None and not (against / "liger_kernel").is_dir():
        raise typer.BadParameter(f"{against} has no folder liger_kernel")
    check_from(context, source, plots, "ops", "match")
    if source is not None:
        raise typer.Exit(show_file(source, ops or [], match, plots))
    raise typer.Exit(run(ops or [], pick_device(device), match, rounds, compile, heap, against, json, plots))


@bench.command("step")
def bench_step(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="llama3-8b (when left out on CUDA), qwen2-7b, qwen2-0.5b, tiny (on the CPU), a folder "
                                                "with a config.json, or such a file.")] = None,
    device: Device = "auto",
    arms: Annotated[str, typer.Option(help="hf as it ships, patched, compile (hf compiled), fused (patched, and fuse_residual_norms); in "
                                           "this order.")] = "hf,patched,compile",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each arm.")] = 4,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 2,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step; 2 on the CPU, 4 on CUDA.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence; 128 on the CPU, 4096 on CUDA.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers; the model's own number when left out.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; float32 on the CPU, bfloat16 on CUDA.")] = None,
    attention: Annotated[str, typer.Option(help="transformers' attn_implementation.")] = "sdpa",
    checkpointing: Annotated[bool, typer.Option(help="Recompute each layer in backward.")] = True,
    minutes: Annotated[float, typer.Option(min=0, help="Limit of the whole call; what has not finished is reported so.")] = 8,
    json: Json = None,
    plots: Plots = None,
    source: From = None,
):
    """Time whole training steps of a causal language model with random weights: speed, memory, launches, time by part."""
    from liger_kernel.cli.step import ARMS, run, show_file

    wanted = arms.split(",")
    if not set(wanted) <= set(ARMS) or len(set(wanted)) < len(wanted):
        raise typer.BadParameter(f"--arms is {arms!r}, expected some of {','.join(ARMS)}, each once")
    if dtype not in (None, "bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype is {dtype!r}, expected bfloat16 or float32")
    check_from(context, source, plots)
    if source is not None:
        raise typer.Exit(show_file(source, plots))
    device = pick_device(device)
    model = model or ("tiny" if device == "cpu" else "llama3-8b")
    raise typer.Exit(run(model, device, wanted, minutes, json, plots, steps=steps, warmup=warmup, batch=batch, seq=seq, layers=layers,
                         dtype=dtype, attention=attention, checkpointing=checkpointing))


MODEL_HELP = "llama3-8b (when left out on CUDA), qwen2-7b, qwen2-0.5b, tiny (on the CPU), a folder with a config.json, or such a file."
Model = Annotated[str | None, typer.Argument(help=MODEL_HELP)]
Layers = Annotated[int | None, typer.Option(min=1, help="Decoder layers; the model's own number when left out.")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16 or float32; float32 on the CPU, bfloat16 on CUDA.")]
Checkpointing = Annotated[bool, typer.Option(help="Recompute each layer in backward.")]
Minutes = Annotated[float, typer.Option(min=0, help="Limit of the whole call; what has not finished is reported so.")]


def check_report(context, dtype, source):
    """The options that `profile` and `memory` share."""
    if dtype not in (None, "bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype is {dtype!r}, expected bfloat16 or float32")
    check_from(context, source, None)


@app.command()
def profile(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL_OR_SCRIPT]",
                                                help=f"{MODEL_HELP[:-1]}; or a training script, *.py.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own, behind --.")] = None,
    device: Device = "auto",
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step; 4.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence; 512 on the CPU, 4096 on CUDA.")] = None,
    layers: Layers = None,
    dtype: Dtype = None,
    checkpointing: Checkpointing = True,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed steps of each arm; 5 on the CPU, 4 on CUDA.")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Load the weights in the folder MODEL instead of random ones.")] = False,
    minutes: Minutes = 8,
    out: Annotated[pathlib.Path | None, typer.Option(
        file_okay=False, help="Folder of page, chart and traces; profile, with --from none.")] = None,
    json: Json = None,
    source: From = None,
):
    """Say where one training step goes, as transformers ships it and patched: time by part, idle gaps, peak memory by phase."""
    from liger_kernel.cli.profile import is_script, run, show_file

    check_report(context, dtype, source)
    if source is not None:
        raise typer.Exit(show_file(source, out))
    device = pick_device(device)
    model = model or ("tiny" if device == "cpu" else "llama3-8b")
    if is_script(model):
        refuse_all_but(context, "a script", "model", "arguments", "device", "steps", "minutes", "out", "json")
    elif arguments:
        raise typer.BadParameter(f"{' '.join(arguments)}: only a script (*.py) takes arguments of its own")
    raise typer.Exit(run(model, device, minutes, json, out or pathlib.Path("profile"), arguments or (), batch=batch, seq=seq, layers=layers,
                         dtype=dtype, checkpointing=checkpointing, steps=steps, weights=weights))


@app.command()
def memory(
    context: typer.Context,
    model: Model = None,
    device: Device = "auto",
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step; 2 on the CPU, 4 on CUDA.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence; 256 on the CPU, 4096 on CUDA.")] = None,
    layers: Layers = None,
    dtype: Dtype = None,
    checkpointing: Checkpointing = True,
    vocabs: Annotated[str | None, typer.Option(help="Vocabularies beside the model's own, e.g. 32k,128256,1M (k is 1024).")] = None,
    seqs: Annotated[str | None, typer.Option(help="Sequence lengths to measure, e.g. 1024,4k.")] = None,
    fit: Annotated[str | None, typer.Option(help="Find the largest batch or seq that fits instead.")] = None,
    limit: Annotated[str | None, typer.Option(help="What it must fit in, e.g. 80GB; the device's memory on CUDA, 256MB of torch's "
                                                   "allocations on the CPU.")] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Only the table of predicted sizes; measures nothing.")] = False,
    minutes: Minutes = 8,
    out: Annotated[pathlib.Path | None, typer.Option(file_okay=False, help="Folder of page and plot; memory, with --from none.")] = None,
    json: Json = None,
    source: From = None,
):
    """Measure a training step's peak memory, as transformers ships it and patched, beside what formulae predict."""
    from liger_kernel.cli.memory import run, show_file, show_predicted

    check_report(context, dtype, source)
    if fit not in (None, "batch", "seq"):
        raise typer.BadParameter(f"--fit is {fit!r}, expected batch or seq")
    if limit is not None and fit is None:
        raise typer.BadParameter("--limit belongs to --fit")
    if fit is not None:
        refuse(f"--fit {fit}", {"--vocabs": vocabs, "--seqs": seqs, f"--{fit}": batch if fit == "batch" else seq})
    if predict:
        refuse_all_but(context, "--predict", "predict", "batch", "seq", "checkpointing")
        raise typer.Exit(show_predicted(batch, seq, checkpointing))
    if source is not None:
        raise typer.Exit(show_file(source, out))
    device = pick_device(device)
    model = model or ("tiny" if device == "cpu" else "llama3-8b")
    raise typer.Exit(run(model, device, minutes, json, out or pathlib.Path("memory"), vocabs=vocabs, seqs=seqs, fit=fit, limit=limit,
                         batch=batch, seq=seq, layers=layers, dtype=dtype, checkpointing=checkpointing))


@app.command()
def numerics(
    context: typer.Context,
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to measure; all, and a model's modules, when left out.")] = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="Some of fp32,bf16,fp16.")] = "fp32,bf16,fp16",
    json: Json = None,
    plots: Plots = None,
    source: From = None,
):
    """Measure every op's error against fp64 beside eager PyTorch's and the bound, and a model's modules. Exit code 1 on a failure."""
    from liger_kernel.cli.numerics import DTYPES, run, show_file

    names = dict(zip(("fp32", "bf16", "fp16"), DTYPES, strict=True))
    if not set(dtype.split(",")) <= set(names):
        raise typer.BadParameter(f"--dtype is {dtype!r}, expected some of {','.join(names)}")
    check_from(context, source, plots, "ops")
    if source is not None:
        raise typer.Exit(show_file(source, ops or [], plots))
    wanted = tuple(name for short, name in names.items() if short in dtype.split(","))
    raise typer.Exit(run(ops or [], pick_device(device), wanted, json, plots))


@app.command()
def convergence(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="tiny (when left out on the CPU), 100m (on CUDA), another preset of `liger bench "
                                                "step`, a folder with a config.json, or such a file.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda:N; cuda or auto: each arm on a device of its own if it can.")] = "auto",
    out: Annotated[pathlib.Path, typer.Option(
        file_okay=False, help="Folder of the run: logs, checkpoints, report. The same call goes on from there.")]
        = pathlib.Path("out/convergence"),
    tokens: Annotated[int | None, typer.Option(min=1, help="Length of the run; 100 thousand on the CPU, a billion on CUDA.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step; 8 on the CPU, 64 on CUDA.")] = None,
    seq: Annotated[int | None, typer.Option(min=8, help="Tokens a sequence; 128 on the CPU, 1024 on CUDA.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Text files, folders of them, or a data set saved on disk; repeatable. Python's "
                                                   "standard library when left out.")] = None,
    tokenizer: Annotated[str, typer.Option(help="bpe (trained on the text), bytes, or a folder with a tokenizer.json.")] = "bpe",
    synthetic: Annotated[bool, typer.Option(help="Tokens of a Markov source instead of text.")] = False,
    spread: Annotated[bool, typer.Option(help="A third arm: without the kernels, from another seed's weights.")] = False,
    control: Annotated[bool, typer.Option(help="Leave the kernels off in both arms.")] = False,
    minutes: Annotated[float | None, typer.Option(min=0.1, help="Stop by then, with a checkpoint.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, or bf16: autocast over fp32 weights; fp32 on the CPU, bf16 on CUDA.")] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Largest learning rate; 1e-3 below a width of 512, else 6e-4.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and data.")] = 0,
    log_every: Annotated[int, typer.Option(min=1, help="Steps from one line of the logs to the next.")] = 1,
    limit: Annotated[float, typer.Option(min=0, help="Largest relative difference of the smoothed losses.")] = 0.01,
    checkpoint: Annotated[str, typer.Option(help="full: 12 bytes a parameter and arm; compact: 8, moments in bf16; none.")] = "full",
    part_mb: Annotated[int, typer.Option(min=1, help="Largest file of a checkpoint, in MiB.")] = 1024,
    keep: Annotated[bool, typer.Option(help="Keep the checkpoints of a run that has ended.")] = False,
    fresh: Annotated[bool, typer.Option(help="Begin again.")] = False,
    json: Json = None,
    plots: Annotated[pathlib.Path | None, typer.Option(file_okay=False, help="With --from: draw the report into this folder.")] = None,
    source: From = None,
):
    """Train one model with and without the kernels and compare the losses. Exit code 1 when they differ by more than the limit."""
    require("matplotlib", "transformers", purpose="liger convergence")
    from liger_kernel.cli.convergence import run, show_file

    if precision not in (None, "fp32", "bf16"):
        raise typer.BadParameter(f"--precision is {precision!r}, expected fp32 or bf16")
    if checkpoint not in ("full", "compact", "none"):
        raise typer.BadParameter(f"--checkpoint is {checkpoint!r}, expected full, compact or none")
    if synthetic and data:
        raise typer.BadParameter("--synthetic takes the place of --data")
    check_from(context, source, plots)
    if source is not None:
        raise typer.Exit(show_file(source, plots))
    if plots is not None:
        raise typer.BadParameter("--plots belongs to --from; a run draws into --out")
    model = model or ("tiny" if pick_device(device) == "cpu" else "100m")
    raise typer.Exit(run(model, device, out, tokens=tokens, data=data or (), tokenizer=tokenizer, synthetic=synthetic, spread=spread,
                         control=control, minutes=minutes, fresh=fresh, keep=keep, limit=limit, json_path=json, part_mb=part_mb,
                         batch=batch, seq=seq, precision=precision, lr=lr, seed=seed, log_every=log_every, checkpoint=checkpoint))


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=4, help="Training steps of each run.")] = 40,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step; 4 on the CPU, 8 on CUDA.")] = None,
    seq: Annotated[int | None, typer.Option(min=8, help="Tokens a sequence; 256 on the CPU, 2048 on CUDA.")] = None,
    device: Device = "auto",
    out: Annotated[pathlib.Path, typer.Option(file_okay=False, help="Folder of the report.")] = pathlib.Path("demo"),
    hidden: Annotated[int | None, typer.Option(min=32, help="Model width; 256 on the CPU, 2048 on CUDA.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers; 4 on the CPU, 8 on CUDA.")] = None,
    vocab: Annotated[int, typer.Option(min=300, help="Vocabulary of the tokenizer that is trained on the spot.")] = 32768,
):
    """Train a small Llama as it ships and with the kernels, on the same data, and write a report."""
    from liger_kernel.cli.demo import run

    raise typer.Exit(run(pick_device(device), out, steps=steps, batch=batch, seq=seq, hidden=hidden, layers=layers, vocab=vocab))


@app.command()
def hub(
    folder: Annotated[pathlib.Path, typer.Argument(
        file_okay=False, help="Is made where it is missing; an older repository there is written over.")],
    bundle: Annotated[bool, typer.Option(help="Also variants with a copy of the package, which need nothing installed but torch.")] = True,
):
    """Write a kernel repository for transformers' `use_kernels`, as `python -m liger_kernel.hub` does. Prints the variants."""
    from liger_kernel.hub import write_repository

    try:
        written = write_repository(folder, bundle)
    except (FileExistsError, NotADirectoryError) as error:
        raise typer.BadParameter(str(error)) from None
    for path in written:
        typer.echo(path)


@app.command("new-op")
def new_op(
    name: Annotated[str, typer.Argument(help="Lower-case words joined by underscores.")],
    into: Annotated[pathlib.Path | None, typer.Option(help="The ops folder; this source tree's when left out.")] = None,
):
    """Write a new op folder that builds and passes its tests: y = x * factor, to be replaced by the real arithmetic."""
    from liger_kernel.cli.new_op import run

    raise typer.Exit(run(name, into))
