"""A command's worker: a process of its own that reports by marked JSON lines on stdout, so that other output does no harm."""

import json
import subprocess
import threading

MARK = "LIGER_EVENT "


def emit(**event):
    """Called by the worker: one event."""
    print(MARK + json.dumps(event), flush=True)


class Child:
    """Called by the command: starts the worker, gives its events one by one, then says how it ended."""

    def __init__(self, command, env=None):
        self.stopped = False
        self.errors = []
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def events(self, seconds=None):
        """Every event as a dict until the worker ends; after `seconds` it is ended (`stopped`)."""
        reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr))
        timer = threading.Timer(seconds, self.stop) if seconds is not None else None
        with self.process:
            reader.start()
            if timer:
                timer.start()
            try:
                for line in self.process.stdout:
                    _, mark, event = line.partition(MARK)  # behind what a script printed without ending its line
                    if mark:
                        yield json.loads(event)
            except BaseException:  # the command is interrupted: its worker goes too
                self.process.kill()
                raise
            finally:
                if timer:
                    timer.cancel()
                reader.join()

    def stop(self):
        self.stopped = True
        self.process.kill()

    def answer(self):
        """Lets a worker go on that waits for a line."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def failure(self, lines=12):
        """None, or the exit code with the end of what the worker wrote to stderr."""
        code = self.process.returncode
        return None if code == 0 else f"exit code {code}: {''.join(self.errors[-lines:]).strip()}"
