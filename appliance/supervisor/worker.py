"""The worker's process tree: start it, know its members, read its log, end all of it.

Every process of the tree carries APPLIANCE_INSTANCE in its environment (vLLM renames and re-parents its processes, so
names and parents prove nothing). The tree is its own session: a Ctrl-C on the terminal reaches the agent only.
Standard output and error go to a file, because a full pipe would stop the worker when nobody reads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

INSTANCE = "APPLIANCE_INSTANCE"
PATH_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOG_KEEP_BYTES = 8 * 1024**2


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """What to start: `argv` after the interpreter, the complete environment, the log file, the working directory."""

    python: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    cwd: Path


class WorkerTree:
    """One started worker. Not thread-safe; made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], command: WorkerCommand) -> None:
        self._process = process
        self.command = command
        self._offset = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> int | None:
        """None while the API process runs; its return code (negative = signal) afterwards."""
        return self._process.poll()

    def new_log_lines(self) -> list[str]:
        """Whole lines written to the log since the last call."""
        try:
            with open(self.command.log, "rb") as log:
                log.seek(self._offset)
                data = log.read(LOG_KEEP_BYTES)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode("utf-8", "replace").splitlines()

    def members(self) -> list[psutil.Process]:
        return members(self.command.env[INSTANCE])

    def stop(self, *, grace_s: float) -> None:
        """SIGTERM to the API process (vLLM drains), SIGKILL to everything that is left after `grace_s` seconds."""
        if self.status() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=grace_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL the whole tree and wait until none of it is left."""
        end_tree(self.command.env[INSTANCE])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)


def start(command: WorkerCommand) -> WorkerTree:
    """Start the worker. Raises OSError when the interpreter cannot be executed."""
    if command.log.exists():
        os.replace(command.log, command.log.with_suffix(".log.1"))
    path = os.environ.get("PATH") or PATH_DEFAULT
    with open(command.log, "wb") as log:
        process = subprocess.Popen(
            [command.python, "-m", "appliance.worker", "serve", *command.argv],
            env={"PATH": path, **command.env}, cwd=command.cwd, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )
    return WorkerTree(process, command)


def members(instance: str) -> list[psutil.Process]:
    """All living processes whose environment carries this instance mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(INSTANCE) == instance:
                found.append(process)
    return found


def end_tree(instance: str, *, patience_s: float = 10.0) -> Sequence[int]:
    """SIGKILL every process of an instance, again until none is left; returns the pids that were ended.

    Also ends what an earlier agent left behind, which is why `serve` calls it before it starts a worker.
    """
    ended: list[int] = []
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        left = members(instance)
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error, OSError):
                process.send_signal(signal.SIGKILL)
                ended.append(process.pid)
        psutil.wait_procs(left, timeout=0.5)
    return sorted(set(ended))
