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


def outcome(output):
    """(loss or None, what backward starts from or None) of a transformers model's output, tuples included."""
    import torch

    if isinstance(output, tuple):
        tensors = [t for t in output if isinstance(t, torch.Tensor)]
        return (tensors[0], tensors[0]) if tensors and tensors[0].dim() == 0 else (None, tensors[0] if tensors else None)
    loss = getattr(output, "loss", None)
    return loss, loss if loss is not None else getattr(output, "logits", None)


class Watch:
    """Follows a script's model and its optimizers; `measurements` says what is measured from one step to the next."""

    def __init__(self, config):
        self.config, self.model, self.optimizers, self.plan, self.phases, self.done = config, None, [], None, None, False
        self.stepped, self.steps, self.tokens, self.losses, self.whole, self.dtype = False, 0, 0, [], False, None

    def optimizer_made(self, optimizer):
        """Follows the model of the first optimizer that takes a transformers model's parameters, and every optimizer of that model."""
        from liger_kernel.cli.profile.phases import decoder_of

        model = model_of(optimizer)
        if model is None or self.model not in (None, model):
            return
        self.optimizers.append(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self.turn("optimizer"))
        optimizer.register_step_post_hook(self.optimizer_stepped)
        if self.model is not None:
            return
        self.model = model
        if self.config["arm"] == "patched":
            self.patch()
        model.register_forward_hook(self.forward_ended)
        if (decoder := decoder_of(model)) is not None:
            decoder.register_forward_hook(self.decoder_ended)
        kind = type(model)
        original = kind.__call__

        def call(module, *args, **kwargs):  # in front of all hooks: a range that one of them opens lies inside a step
            if module is self.model and self.trains():
                self.called(args, kwargs)
            return original(module, *args, **kwargs)

        kind.__call__ = call

    def patch(self):
        from liger_kernel.patch import patch_model

        try:
            emit(event="patched", report=str(patch_model(self.model)))
        except (TypeError, ValueError, RuntimeError) as e:
            sys.exit(f"{type(self.model).__name__} cannot be patched: {e}")

    def trains(self):
        """Whether a call of the model is one of a training step: none of an evaluation, or of old probabilities in RL."""
        import torch

        return self.model.training and torch.is_grad_enabled()

    def turn(self, phase):
        if self.phases is not None:
            self.phases.turn(phase)

    def called(self, args, kwargs):
        """The model is about to run."""
        if self.done:
            os._exit(0)  # the script caught Enough and went on
        if self.stepped or self.plan is None:
            self.next_step()
        self.turn("forward")
        self.whole = kwargs.get("num_items_in_batch") is not None  # a trainer's: accumulated batches' losses are parts of one
        ids = next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]) if t is not None), None)
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
            self.done = True
            raise Enough from None
        self.tokens, self.losses = 0, []

    def decoder_ended(self, *_):
        import torch

        if self.trains():
            first = next(self.model.parameters())
            low = first.dtype != torch.float32 or torch.is_autocast_enabled(first.device.type)
            self.dtype = "bfloat16" if low else "float32"
            self.turn("loss")

    def forward_ended(self, module, args, output):
        """Notes the loss; backward begins when its gradient, or that of the logits, is there."""
        if not self.trains():
            return
        loss, last = outcome(output)
        if loss is not None:
            self.losses.append(loss.detach())
        if last is not None and last.requires_grad:
            last.register_hook(lambda _: self.turn("backward"))

    def optimizer_stepped(self, *_):
        self.steps += not self.stepped
        self.stepped = True
        self.turn(None)  # what the script does until the model's next call is in no phase

    def loss(self):
        """This step's, as a list; of several batches their sum or mean."""
        values = [float(loss) for loss in self.losses]
        return [sum(values) if self.whole else statistics.fmean(values)] if values else []

    def held(self):
        """Bytes of the gradients that are there when a step begins."""
        return sum(p.grad.numel() * p.grad.element_size() for p in self.model.parameters() if p.grad is not None)

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
            losses += self.loss()
            if i == 0:
                device = next(self.model.parameters()).device
                emit(event="built", parameters=sum(p.numel() for p in self.model.parameters()),
                     script={"model": type(self.model).__name__, "device": str(device), "dtype": self.dtype or "bfloat16",
                             "optimizer": " and ".join(type(o).__name__ for o in self.optimizers), "tokens": self.tokens})
            emit(event="step", step=i + 1, loss=losses[-1] if losses else float("nan"), seconds=seconds[-1])
        emit(event="timed", **worker.timed(losses if len(losses) == count else [], seconds, rates, config["warmup"]))

        state = state_bytes(self.model, *self.optimizers)
        before = state["weights"] + state["optimizer"] + self.held()
        with Phases(cuda) as self.phases:
            yield
        peaks, self.phases = self.phases.peaks(before), None
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
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # nobody answers a question
    script, ended = pathlib.Path(config["script"]), ""
    sys.argv, sys.path[0] = [str(script), *config["arguments"]], str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
        if watch.stepped and not watch.done:  # the script ended behind its last step
            watch.next_step()
    except SystemExit as e:
        ended = f" with {e.code!r}" if e.code else ""
    except BaseException:  # Enough, or what the script made of it
        if not watch.done:
            raise
    if watch.done:
        os._exit(0)  # nothing of the script's is waited for
    if watch.model is None:
        sys.exit(f"{script.name} ended{ended} and made no torch optimizer of a transformers model's parameters")
    name = type(watch.model).__name__
    if watch.plan is None:
        sys.exit(f"{script.name} ended{ended} without a call of {name} in training: a script that calls only a part of it is not measured")
    sys.exit(f"{script.name} ended{ended} after {watch.steps} training steps of {name}, which is too few: {config['warmup']} to warm up, "
             f"{config['steps']} to time (--steps), and a few more to take apart")


if __name__ == "__main__":
    from liger_kernel.cli.profile.worker import guarded

    guarded(main)
