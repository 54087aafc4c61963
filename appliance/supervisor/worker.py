"""The worker's process tree: start it, know its members, read its log, end all of it.

The tree is its own session: a Ctrl-C on the terminal reaches the agent only, and a process belongs to the tree if it
is in that session. vLLM renames its processes (which also wipes the environment the kernel shows) and they are
re-parented when their parent dies, so neither names nor parents prove anything. The session is written to `worker.json`
in the runtime folder, so that a new agent can end what a killed one left behind.
Standard output and error go to a file, because a full pipe would stop the worker when nobody reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from appliance import disk
from appliance.errors import ConfigError
from appliance.identity import identity, reused

LOG_READ_BYTES = 8 * 1024**2
RECORD = "worker.json"


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """What to start: vLLM's arguments, the complete environment, the log file, the working and the runtime folder."""

    python: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    cwd: Path
    runtime: Path


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
                data = log.read(LOG_READ_BYTES)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode("utf-8", "replace").splitlines()

    def members(self) -> list[psutil.Process]:
        return members(self.pid)

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
        end_session(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        with contextlib.suppress(OSError):
            (self.command.runtime / RECORD).unlink()


def start(command: WorkerCommand) -> WorkerTree:
    """Start the worker and record its session.

    Raises ConfigError when the interpreter cannot be executed, StoreError when log or record cannot be written; then
    nothing runs.
    """
    with disk.mapped("cannot start the worker", command.log.parent):
        if command.log.exists():
            command.log.replace(command.log.with_suffix(".log.1"))
        with open(command.log, "wb") as log:
            process = _popen(command, log)
            try:
                (command.runtime / RECORD).write_text(json.dumps(identity(process.pid)))
            except BaseException:
                end_session(process.pid)
                process.wait()
                raise
    return WorkerTree(process, command)


def _popen(command: WorkerCommand, log: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [command.python, "-m", "appliance.worker", "serve", *command.argv], env=dict(command.env), cwd=command.cwd,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{command.python} cannot be started", why=error.strerror or str(error),
                          do="install the worker again") from None


def members(session: int) -> list[psutil.Process]:
    """All living processes of a session, its leader included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_leftovers(runtime: Path) -> list[int]:
    """End the worker that a killed agent left behind, if it is still there; returns the pids that were ended."""
    path = runtime / RECORD
    try:
        leader: Any = json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        leader = None
    # While a member of the session lives, the kernel gives its number to nobody else.
    ended = end_session(leader["pid"]) if isinstance(leader, dict) and not reused(leader) else []
    with contextlib.suppress(OSError):
        path.unlink()
    return ended


def end_session(session: int, *, patience_s: float = 10.0) -> list[int]:
    """SIGKILL every process of a session, again until none is left; returns the pids that were ended."""
    ended: set[int] = set()
    deadline = time.monotonic() + patience_s
    while (left := members(session)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error, OSError):
                process.send_signal(signal.SIGKILL)
                ended.add(process.pid)
        psutil.wait_procs(left, timeout=0.5)
    return sorted(ended)
