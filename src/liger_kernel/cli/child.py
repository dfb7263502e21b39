"""A command's worker: a process of its own that reports by JSON lines on a pipe of their own, so that no other output gets between."""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading

PIPE = "LIGER_EVENT_PIPE"  # number of the pipe's end, in the worker's environment
_PIPE = int(os.environ.pop(PIPE, 0))
if _PIPE:
    os.set_inheritable(_PIPE, False)  # what the worker starts has no part in it


def emit(**event):
    """Called by the worker: one event."""
    with open(_PIPE or 1, "w", closefd=False) as pipe:
        pipe.write(json.dumps(event) + "\n")


class Child:
    """Called by the command: starts the worker, gives its events one by one, then says how it ended."""

    def __init__(self, command, env=None):
        self.stopped = False
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (read when the worker has ended)
        self.pipe, end = os.pipe()
        try:
            self.process = subprocess.Popen(command, env=(os.environ if env is None else env) | {PIPE: str(end)}, pass_fds=(end,),
                                            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.errors, text=True,
                                            start_new_session=True)
        finally:
            os.close(end)

    def _lines(self):
        """The pipe's lines until the worker has ended, whatever it started that lives on."""
        rest = b""
        while True:
            ended = self.process.poll() is not None
            if select.select([self.pipe], [], [], 0 if ended else 0.2)[0]:
                read = os.read(self.pipe, 1 << 16)
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                yield from lines
            elif ended:
                return

    def events(self, seconds=None):
        """Every event as a dict until the worker ends; after `seconds` it is ended (`stopped`). What it started ends with it."""
        timer = threading.Timer(seconds, self.stop) if seconds is not None else None
        if timer:
            timer.start()
        try:
            for line in self._lines():
                yield json.loads(line)
            self.process.wait()
        finally:
            if timer:
                timer.cancel()
            self._kill()
            os.close(self.pipe)
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()

    def _kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self):
        self.stopped = True
        self._kill()

    def answer(self):
        """Lets a worker go on that waits for a line."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def failure(self, lines=12):
        """None, or the exit code with the end of what the worker wrote to stderr."""
        code = self.process.returncode
        if code == 0:
            return None
        self.errors.seek(0)
        return f"exit code {code}: {''.join(self.errors.read().decode(errors='replace').splitlines(keepends=True)[-lines:]).strip()}"
