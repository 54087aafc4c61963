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
import re
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
from appliance.supervisor.leaf import Leaf

LOG_READ_BYTES = 1024**2
LOG_BYTES = 16 * 1024**2
"""A log that grew beyond this is cut: its last half stays, as `worker.log.1`."""
SCAN_S = 2.0
"""Well below the time after which an engine without CPU time is taken for frozen."""
OOM_SCORE = "500"
"""When memory runs out the kernel ends the worker, not the agent, which then can say so."""
RECORD = "worker.json"


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """What to start: vLLM's arguments, the complete environment, the log file, the working and the runtime folder;
    `leaf`: the control group it belongs to, where there is one of its own."""

    python: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    cwd: Path
    runtime: Path
    leaf: Leaf | None = None


class WorkerTree:
    """One started worker. Not thread-safe; made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], command: WorkerCommand) -> None:
        self._process = process
        self.command = command
        self._offset = 0
        self._members: list[psutil.Process] = []
        self._scanned = 0.0
        self._began = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> int | None:
        """None while the API process runs; its return code (negative = signal) afterwards."""
        return self._process.poll()

    def new_log_lines(self) -> list[str]:
        """Whole lines written to the log since the last call, at most LOG_READ_BYTES of them."""
        try:
            with open(self.command.log, "rb") as log:
                size = os.fstat(log.fileno()).st_size
                if size < self._offset:
                    self._offset = 0
                # A worker that floods its log is not read line by line: its last words count.
                self._offset = max(self._offset, size - LOG_READ_BYTES)
                log.seek(self._offset)
                data = log.read(LOG_READ_BYTES)
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        if self._offset > LOG_BYTES:
            data = data[:end] + self._cut_log()
            end = data.rfind(b"\n") + 1
        return data[:end].decode("utf-8", "replace").splitlines()

    def _cut_log(self) -> bytes:
        """Keep the last half in `worker.log.1` and empty the log, which the worker goes on appending to; returns what
        it wrote meanwhile."""
        rest = b""
        with contextlib.suppress(OSError), open(self.command.log, "r+b") as log, \
                open(self.command.log.with_suffix(".log.1"), "wb") as kept:
            log.seek(self._offset - LOG_BYTES // 2)
            kept.write(log.read(LOG_BYTES // 2))
            kept.flush()  # a full disk is noticed before anything is lost
            rest = log.read(LOG_READ_BYTES)
            log.truncate(0)
            self._offset = 0
            kept.write(rest)
        return rest

    def members(self, now: float | None = None) -> list[psutil.Process]:
        """The living processes of the tree; with `now` (monotonic) as found within the last SCAN_S, or sooner in a
        young tree: an engine that is not known yet would look as if it did not run."""
        if now is None or now - self._scanned >= min(SCAN_S, 1 + (now - self._began) / 4) or not self._members:
            self._members, self._scanned = members(self.pid), time.monotonic()
        return self._members

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time of the whole tree, and of all but its leader (the engine and what it starts).

        Children that ended count in their parent: an engine that waits for one compiler after another does run.
        """
        tree = engine = 0.0
        for process in self.members(time.monotonic()):
            with contextlib.suppress(psutil.Error, OSError):
                spent = sum(process.cpu_times()[:4])  # user and system, its own and of children that ended
                tree += spent
                engine += spent if process.pid != self.pid else 0.0
        return tree, engine

    def engine_seconds(self) -> dict[int, float]:
        """CPU time of each of several engines, by the number in the title that vLLM gives its process."""
        spent: dict[int, float] = {}
        for process in self.members(time.monotonic()):
            with contextlib.suppress(psutil.Error, OSError):
                title = re.search(r"::EngineCore_DP(\d+)", " ".join(process.cmdline()[:1]))
                if title:
                    spent[int(title[1])] = sum(process.cpu_times()[:4])
        return spent

    def ask_to_end(self) -> None:
        """SIGTERM to the API process: vLLM finishes what runs."""
        if self.status() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> bool:
        """SIGKILL whatever is left of the tree. True when none of it is left; does not wait."""
        leaf = self.command.leaf
        if leaf is not None:
            leaf.kill()
        left = members(self.pid)
        for process in left:
            with contextlib.suppress(psutil.Error, OSError):
                process.send_signal(signal.SIGKILL)
        self._members = left
        if left or self.status() is None or (leaf is not None and leaf.members()):
            return False
        with contextlib.suppress(OSError):
            (self.command.runtime / RECORD).unlink()
        return True


def start(command: WorkerCommand) -> WorkerTree:
    """Start the worker and record its session.

    Raises ConfigError when the interpreter cannot be executed, StoreError when log or record cannot be written; then
    nothing runs.
    """
    with disk.mapped("cannot start the worker", command.log.parent):
        if command.log.exists():
            command.log.replace(command.log.with_suffix(".log.1"))
        with open(command.log, "wb"):
            pass
        with open(command.log, "ab") as log:  # appending: the log may be cut while the worker writes
            process = _popen(command, log)
            if command.leaf is not None:
                command.leaf.enter(process.pid)
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/oom_score_adj").write_text(OOM_SCORE)
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
