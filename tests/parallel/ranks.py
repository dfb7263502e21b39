"""Processes that stay for a whole test session and run functions together, as ranks of one process group.

They are spawned, never forked, so that a CUDA context of the parent does no harm, and meet through a file, so that sessions side
by side cannot take each other's port. With two GPUs or more the group is NCCL's on one GPU a rank, else gloo's on the CPU.
A rank that fails or is late ends all of them; the next call starts new ones.
"""

import faulthandler
import importlib.util
import inspect
import itertools
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback

import pytest
import torch

TIMEOUT_S = 240  # for one call; starting counts towards the first
CUDA = torch.cuda.device_count() >= 2
WORLD = int(os.environ.get("LIGER_TEST_RANKS", "0")) or (min(torch.cuda.device_count(), 4) if CUDA else 2)
DEVICE = "cuda" if CUDA else "cpu"


def _function(file, name):
    """The function `name` of a test module, which pytest imports by its path."""
    module = "rank_of_" + os.path.basename(file).removesuffix(".py")
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], name)


def _serve(rank, rendezvous, pipe):
    torch.set_num_threads(1)
    if CUDA:
        torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.distributed.init_process_group(
        "nccl" if CUDA else "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    while (call := pipe.recv()) is not None:
        file, name, arguments = call
        faulthandler.dump_traceback_later(TIMEOUT_S - 10)
        try:
            _function(file, name)(*arguments)
            torch.distributed.barrier()
            answer = None
        except BaseException as error:  # noqa: BLE001 - a skip is one too
            skipped = isinstance(error, pytest.skip.Exception)
            answer = ("skip", str(error)) if skipped else ("fail", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        _forget()
        pipe.send(answer)
    torch.distributed.destroy_process_group()


def _forget():
    """What one call leaves behind in the process must not reach the next."""
    if "liger_kernel.patch" in sys.modules:
        sys.modules["liger_kernel.patch"].unpatch()
    torch._dynamo.reset()


class Ranks:
    def __init__(self, folder):
        self.folder, self.count, self.processes, self.pipes = folder, itertools.count(), [], []

    def _start(self):
        context = multiprocessing.get_context("spawn")
        rendezvous = self.folder / f"rendezvous-{next(self.count)}"
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, rendezvous, there), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(here)
            there.close()

    def __call__(self, function, *arguments):
        """Calls `function(*arguments)` on every rank; fails with the traceback of the first that fails, skips where all skip."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((inspect.getfile(function), function.__name__, arguments))
        answers, late = {}, time.monotonic() + TIMEOUT_S
        while len(answers) < WORLD:
            waiting = [pipe for pipe in self.pipes if pipe not in answers]
            for pipe in multiprocessing.connection.wait(waiting, max(0, late - time.monotonic())):
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    answers[pipe] = ("fail", "the process ended")
                if answers[pipe] is not None:
                    late = min(late, time.monotonic() + 5)  # the others may wait for this one for ever
            if time.monotonic() >= late:
                break
        told = [answers.get(pipe, ("fail", "no answer")) for pipe in self.pipes]
        if all(answer is not None and answer[0] == "skip" for answer in told):
            pytest.skip(told[0][1])
        if any(told):
            self.stop(kill=True)
            pytest.fail("\n".join(f"rank {rank}: {' '.join(answer)}" for rank, answer in enumerate(told) if answer is not None))

    def stop(self, kill=False):
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            try:
                if not kill:
                    pipe.send(None)
                    process.join(20)
            except OSError:
                pass
            process.kill()
            process.join()
            pipe.close()
        self.processes, self.pipes = [], []
