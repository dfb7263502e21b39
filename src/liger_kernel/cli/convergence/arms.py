"""Runs the arms side by side: at once where each has a device, else in turns of some seconds, so that they always stand close."""

import concurrent.futures
import json
import os
import sys
import time

from liger_kernel.cli.child import Child

TURN_S = 10.0  # a turn of one arm on a shared device
SAVE_EVERY_S = 240.0
SAVE_BYTES_PER_S = 3e8  # before the first save has shown the disk's


class Arm:
    """One worker and what it last said."""

    def __init__(self, config, progress):
        self.name, self.device, self.steps, self.folder = config["arm"], config["device"], config["steps"], config["folder"]
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
        raise SystemExit(f"the arm {self.name} failed, {self.child.failure() or 'without a word'}")

    def order(self, do, **more):
        """Gives an order and waits until it is done."""
        self.child.process.stdin.write(json.dumps({"do": do} | more) + "\n")
        self.child.process.stdin.flush()
        self.wait()

    def train(self, until):
        """Trains up to a step and notes the time of one."""
        start, before = time.monotonic(), self.step
        if until > before:
            self.order("train", until=until)
            self.per_step = (time.monotonic() - start) / (self.step - before)

    def stop(self):
        """Lets the worker end."""
        if self.child.process.poll() is None:
            self.child.process.stdin.write(json.dumps({"do": "stop"}) + "\n")
            self.child.process.stdin.flush()
            for _ in self.events:
                pass

    def kill(self):
        self.child.stop()


def train(configs, minutes, begun, progress, save_bytes):
    """Trains every arm to its last step, or until `minutes` after `begun` are nearly over.

    Args:
        configs: one dict an arm; those with the same "device" take turns.
        minutes: None for no limit.
        begun: time.monotonic() at the call's start.
        progress: a rich Progress whose tasks have a field "note".
        save_bytes: parameters -> bytes of an arm's checkpoint.

    Returns:
        The arms, each stopped behind its last step or with a checkpoint there.
    """
    arms = [Arm(config, progress) for config in configs]
    groups = {}
    for arm in arms:
        groups.setdefault(arm.device, []).append(arm)
    steps = configs[0]["steps"]
    try:
        with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
            def everywhere(work):
                """`work` on every arm: at once on different devices, one after the other on the same."""
                for done in [pool.submit(lambda group=group: [work(arm) for arm in group]) for group in groups.values()]:
                    done.result()

            everywhere(Arm.wait)
            save_s, last_save = sum(save_bytes(arm.parameters) for arm in arms) / SAVE_BYTES_PER_S, time.monotonic()
            turn = 1
            while min(arm.step for arm in arms) < steps:
                until = min(steps, min(arm.step for arm in arms) + turn)
                everywhere(lambda arm, until=until: arm.train(until))
                slowest = max(arm.per_step for arm in arms if arm.per_step)
                turn = max(1, min(int(TURN_S / slowest), 4 * turn))
                now = time.monotonic()
                round_s = slowest * turn * max(map(len, groups.values()))
                ends = minutes is not None and now - begun + round_s + 1.5 * save_s > minutes * 60
                if ends or now - last_save > max(SAVE_EVERY_S, 10 * save_s):
                    everywhere(lambda arm: arm.order("save"))
                    save_s, last_save = time.monotonic() - now, time.monotonic()
                if ends:
                    break
            else:
                everywhere(lambda arm: arm.order("save"))
            everywhere(Arm.stop)
    except BaseException:
        for arm in arms:
            arm.kill()
        raise
    return arms
