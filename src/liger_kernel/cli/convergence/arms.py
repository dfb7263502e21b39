"""Runs the arms: on one device in turns of some seconds, so that they always stand close, on several each alone on the next free one."""

import concurrent.futures
import contextlib
import json
import os
import sys
import threading
import time

from liger_kernel.cli.child import Child

TURN_S = 10.0  # a turn of one arm on a shared device
SAVE_EVERY_S = 240.0
SAVE_BYTES_PER_S = 3e8  # before the first save has shown the disk's


class Arm:
    """One worker and what it last said."""

    def __init__(self, config, progress):
        self.name, self.steps, self.folder = config["arm"], config["steps"], config["folder"]
        self.step, self.parameters, self.report, self.per_step = 0, 0, None, None
        self.progress, self.task = progress, progress.add_task(f"{self.name:9s}", total=config["steps"], note="starting")
        env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        self.child = Child([sys.executable, "-m", "liger_kernel.cli.convergence.train", json.dumps(config)], env)
        self.events = self.child.events()

    def wait(self):
        """Takes events until the worker is ready for an order; SystemExit when it ended instead."""
        for event in self.events:
            kind = event.pop("event")
            if kind == "ready":
                self.step = event["step"]
                self.progress.update(self.task, completed=self.step)
                return
            if kind == "built":
                self.parameters = event["parameters"]
            elif kind == "patched":
                self.report = event["report"]
            else:
                note = f"loss {event['loss']:.4f}, {event['tokens_per_s']:,.0f} tokens/s"
                self.progress.update(self.task, completed=event["step"], note=note)
        raise self.failed()

    def failed(self):
        return SystemExit(f"the arm {self.name} failed, {self.child.failure() or 'without a word'}")

    def say(self, do, **more):
        """Gives an order."""
        with contextlib.suppress(BrokenPipeError):  # it has died in another arm's turn: its events end, and then its exit code is known
            self.child.process.stdin.write(json.dumps({"do": do} | more) + "\n")
            self.child.process.stdin.flush()

    def order(self, do, **more):
        """Gives an order and waits until it is done; SystemExit when the worker ended instead."""
        self.say(do, **more)
        self.wait()

    def train(self, until):
        """Trains up to a step and notes the time of one."""
        start, before = time.monotonic(), self.step
        if until > before:
            self.order("train", until=until)
            self.per_step = (time.monotonic() - start) / (self.step - before)

    def stop(self):
        """Lets the worker end; SystemExit when it failed."""
        self.say("stop")
        for _ in self.events:
            pass
        if self.child.process.returncode:
            raise self.failed()

    def kill(self):
        self.child.stop()


def take_turns(arms, left, save_bytes):
    """Trains the arms of one device to their last step, or until the time is nearly over, then saves and lets them end.

    Args:
        arms: those that share the device; each has just been started.
        left: () -> seconds that are left, infinite without a limit.
        save_bytes: parameters -> bytes of an arm's checkpoint.

    Returns:
        Seconds that starting and saving took, so that another arm is not begun in less.
    """
    started = time.monotonic()
    for arm in arms:
        arm.wait()
    last_save = time.monotonic()
    start_s, save_s = last_save - started, sum(save_bytes(arm.parameters) for arm in arms) / SAVE_BYTES_PER_S
    turn, steps = 1, arms[0].steps
    while (step := min(arm.step for arm in arms)) < steps:
        for arm in arms:
            arm.train(min(steps, step + turn))
        slowest = max(arm.per_step for arm in arms if arm.per_step)
        turn = max(1, min(int(TURN_S / slowest), 4 * turn))
        now = time.monotonic()
        ends = slowest * turn * len(arms) + 1.5 * save_s > left()
        if ends or now - last_save > max(SAVE_EVERY_S, 10 * save_s) or min(arm.step for arm in arms) == steps:
            for arm in arms:
                arm.order("save")
            last_save = time.monotonic()
            save_s = last_save - now
        if ends:
            break
    for arm in arms:
        arm.stop()
    return start_s + 1.5 * save_s


def train(configs, devices, minutes, begun, progress, save_bytes):
    """Trains every arm to its last step, or until `minutes` after `begun` are nearly over.

    Args:
        configs: one dict an arm. On one device they take turns; of several each takes the next arm when it is free.
        devices: torch's names of them.
        minutes: None for no limit.
        begun: time.monotonic() at the call's start.
        progress: a rich Progress whose tasks have a field "note".
        save_bytes: parameters -> bytes of an arm's checkpoint.

    Returns:
        The arms that were begun, each stopped behind its last step or with a checkpoint there.
    """
    waiting = [[config] for config in configs] if len(devices) > 1 else [configs]
    arms, lock = [], threading.Lock()

    def left():
        return float("inf") if minutes is None else minutes * 60 - (time.monotonic() - begun)

    def serve(device):
        needs_s = 0.0
        while left() > needs_s:
            with lock:
                if not waiting:
                    return
                group = waiting.pop(0)
                own = [Arm(config | {"device": device, "shared": len(group) > 1}, progress) for config in group]
                arms.extend(own)
            needs_s = take_turns(own, left, save_bytes)

    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        try:
            for served in concurrent.futures.as_completed([pool.submit(serve, device) for device in devices]):
                served.result()
        except BaseException:
            with lock:
                waiting.clear()
                for arm in arms:
                    arm.kill()
            raise
    return arms
