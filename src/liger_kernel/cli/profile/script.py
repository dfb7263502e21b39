"""One arm of `liger profile SCRIPT.py`, in a process of its own: runs the script and measures its training steps from outside.

The model is the transformers model whose parameters the script's first optimizer takes; the patched arm patches it there, before a
trainer wraps it. A step lasts from the model's first call after the optimizer's last step to the next such call, whatever the
script does in between. Once everything is measured the script ends, by an exception that none but a `finally` sees.
"""

import gc
import os
import pathlib
import random
import runpy
import statistics
import sys
import time

from liger_kernel.cli.child import emit


class Enough(BaseException):
    """Everything is measured."""


def model_of(optimizer):
    """The transformers model, none that another one holds, with a parameter that an optimizer takes; None where there is none."""
    from transformers import PreTrainedModel

    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    models = [o for o in gc.get_objects() if issubclass(type(o), PreTrainedModel)]
    inner = {id(module) for model in models for module in model.modules() if module is not model}
    return next((m for m in models if id(m) not in inner and any(id(p) in taken for p in m.parameters())), None)


class Watch:
    """Follows a script's model and optimizer; `plan` says what is measured from one step to the next."""

    def __init__(self, config):
        self.config, self.model, self.optimizer, self.plan, self.phases = config, None, None, None, None
        self.stepped, self.steps, self.tokens, self.losses, self.dtype = False, 0, 0, [], None

    def optimizer_made(self, optimizer):
        """Follows the first optimizer of a transformers model."""
        from liger_kernel.cli.profile.phases import decoder_of

        model = None if self.model is not None else model_of(optimizer)
        if model is None:
            return
        self.model, self.optimizer = model, optimizer
        if self.config["arm"] == "patched":
            from liger_kernel.patch import patch_model

            emit(event="patched", report=str(patch_model(model)))
        optimizer.register_step_pre_hook(lambda *_: self.turn("optimizer"))
        optimizer.register_step_post_hook(self.optimizer_stepped)
        model.register_forward_hook(self.forward_ended)
        if (decoder := decoder_of(model)) is not None:
            decoder.register_forward_hook(self.decoder_ended)
        kind = type(model)
        original = kind.__call__

        def call(module, *args, **kwargs):  # in front of all hooks: a range that one of them opens lies inside a step
            if module is self.model:
                self.called(args, kwargs)
            return original(module, *args, **kwargs)

        kind.__call__ = call

    def turn(self, phase):
        if self.phases is not None:
            self.phases.turn(phase)

    def called(self, args, kwargs):
        """The model is about to run."""
        if not self.model.training:
            return
        if self.stepped or self.plan is None:
            self.next_step()
        self.turn("forward")
        ids = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
        self.tokens += ids.shape[0] * ids.shape[1] if ids is not None else 0

    def next_step(self):
        import torch

        if self.plan is None:  # where the model is now, it trains
            self.cuda = next(self.model.parameters()).is_cuda
            self.plan = self.measurements()
        if self.cuda:
            torch.cuda.synchronize()
        self.stepped = False
        try:
            next(self.plan)
        except StopIteration:
            raise Enough from None
        self.tokens, self.losses = 0, []

    def decoder_ended(self, *_):
        import torch

        kind = next(self.model.parameters()).device.type
        low = next(self.model.parameters()).dtype != torch.float32 or torch.is_autocast_enabled(kind)
        self.dtype = "bfloat16" if low else "float32"
        self.turn("loss")

    def forward_ended(self, module, args, output):
        """Notes the loss; backward begins when its gradient, or that of the logits, is there."""
        if not module.training:
            return
        loss = getattr(output, "loss", None)
        if loss is not None:
            self.losses.append(loss.detach())
        last = loss if loss is not None else getattr(output, "logits", None)
        if last is not None and last.requires_grad:
            last.register_hook(lambda _: self.turn("backward"))

    def optimizer_stepped(self, *_):
        self.stepped, self.steps = True, self.steps + 1
        self.turn("forward")  # what the script does before the next step's forward

    def measurements(self):
        """A generator that is asked to go on where a step begins."""
        import torch

        from liger_kernel.cli.demo.parts import marked
        from liger_kernel.cli.profile import worker
        from liger_kernel.cli.profile.phases import Phases
        from liger_kernel.cli.step import kinds
        from liger_kernel.cli.step.worker import state_bytes

        config, cuda = self.config, self.cuda
        count, profiled = config["warmup"] + config["steps"], 1 if cuda else worker.CPU_PROFILED
        losses, seconds, rates = [], [], []
        for i in range(count):
            start = time.perf_counter()
            yield
            seconds.append(time.perf_counter() - start)
            rates.append(self.tokens / seconds[-1])
            losses += [statistics.fmean(map(float, self.losses))] if self.losses else []
            if i == 0:
                device = next(self.model.parameters()).device
                emit(event="built", parameters=sum(p.numel() for p in self.model.parameters()),
                     script={"model": type(self.model).__name__, "device": str(device), "dtype": self.dtype or "bfloat16",
                             "optimizer": type(self.optimizer).__name__, "tokens": self.tokens})
            emit(event="step", step=i + 1, loss=losses[-1] if losses else float("nan"), seconds=seconds[-1])
        emit(event="timed", **worker.timed(losses if len(losses) == count else [], seconds, rates, config["warmup"]))

        state = state_bytes(self.model, self.optimizer)
        with Phases(cuda) as self.phases:
            yield
        peaks, self.phases = self.phases.peaks(state["weights"] + state["optimizer"]), None
        emit(event="memory", state_bytes=state, peak_bytes=peaks)

        tables = []
        with marked(self.model):
            for i in range(profiled):
                with torch.profiler.profile(activities=worker.activities(cuda)) as profile:
                    yield
                tables.append(kinds.table(profile.events(), cuda, False, None))
                emit(event="profiling", step=i + 1, of=profiled)
        worker.report_profiled(profile, tables, cuda, config["trace"])


def main(config):
    kind, _, number = config["device"].partition(":")
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "").split(",")
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:  # the script sees this one alone
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(number or 0)] if visible[0] else number or "0"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # hooks and compiled code do not mix
    import numpy as np
    import torch

    watch, original = Watch(config), torch.optim.Optimizer.__init__

    def made(optimizer, *args, **kwargs):
        original(optimizer, *args, **kwargs)
        watch.optimizer_made(optimizer)

    torch.optim.Optimizer.__init__ = made
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(config["seed"])
    script = pathlib.Path(config["script"])
    sys.argv, sys.path[0] = [str(script), *config["arguments"]], str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
        if watch.stepped:  # the script ended behind its last step
            watch.next_step()
    except Enough:
        sys.stdout.flush()
        os._exit(0)  # nothing of the script's is waited for
    if watch.model is None:
        sys.exit(f"{script.name} made no torch optimizer of a transformers model's parameters")
    sys.exit(f"{script.name} ended after {watch.steps} training steps of {watch.model.__class__.__name__}, which is too few: "
             f"{config['warmup']} to warm up, {config['steps']} to time (--steps), and a few more to take apart")


if __name__ == "__main__":
    from liger_kernel.cli.profile.worker import guarded

    guarded(main)
