"""What the agent does between two worker lives: prepare the model, wait, end the old worker. None of it waits.

`Preparation` is a child (appliance.provision) whose events are read as they come; `Ending` asks a worker to end, and
kills what is left after its grace. Neither decides what comes next.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from appliance import disk
from appliance.errors import ApplianceError, TransientError, by_exit_code
from appliance.provision import Order
from appliance.supervisor.life import Life
from appliance.supervisor.worker import WorkerTree, members

GRACE_S = 10.0
SILENCE_S = 900.0
"""A preparation that says nothing for so long is ended."""
LONGEST_LINE = 1 << 20
PHASES = {
    "checking": "checking the source",
    "waiting": "waiting: another process adds the same model",
    "preparing": "laying the weights out for the kernels",
    "reading": "reading the source",
    "quantizing": "quantizing",
    "writing": "writing the last files",
    "storing": "checking and storing",
    "clearing": "clearing the compile cache",
    "verifying": "verifying the stored weights",
}


class Preparation:
    """The child that makes the model present. `phase` and `progress` follow its events; `moved`: when one came last."""

    def __init__(self, order: Order, *, env: Mapping[str, str], now: float) -> None:
        self.phase = "looking for the model"
        self.progress: dict[str, Any] | None = None
        self.moved = now
        self.result: dict[str, Any] | None = None
        self.error: ApplianceError | None = None
        self._said: dict[str, Any] = {}
        self._pending = b""
        self._kill_at: float | None = None
        own = {name: value for name, value in env.items() if not name.startswith(("NOTIFY_", "WATCHDOG_"))}
        with disk.mapped("cannot start the preparation", Path(order.directories["state"])):
            self._stderr = _scratch(Path(order.directories["state"]))
            self._child = subprocess.Popen(
                [sys.executable, "-m", "appliance.provision"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._stderr, env=own, start_new_session=True)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(order.text().encode())
            self._child.stdin.close()
        os.set_blocking(self._child.stdout.fileno(), False)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None

    def tick(self, now: float) -> None:
        """Read what it said; afterwards `done` tells whether it ended."""
        ended = self._child.poll()
        self._read(now)
        if ended is None:
            if now - self.moved > SILENCE_S and self.gone(now):
                self.error = TransientError("preparing the model hangs", why=f"no word for {SILENCE_S:.0f} s",
                                            do="look at the disk")
            return
        if ended == 0 and "result" in self._said:
            self.result = self._said["result"].get("report") or {}
        else:
            self.error = self._failure(ended)
        self._close()

    def gone(self, now: float) -> bool:
        """Ask it to end, and all it started; kill what is left after GRACE_S. True when none of it is left: nothing
        half-done is kept. To be called again until then."""
        if self._kill_at is None:
            self._kill_at = now + GRACE_S
            self._child.terminate()
        ended = self._child.poll() is not None
        left = members(self._child.pid) if ended or now >= self._kill_at else []
        for process in left:
            with contextlib.suppress(psutil.Error, OSError):
                process.send_signal(signal.SIGKILL)
        if ended and not left:
            self._close()
        return ended and not left

    def _read(self, now: float) -> None:
        assert self._child.stdout is not None
        while not self._child.stdout.closed:
            try:
                block = os.read(self._child.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not block:
                return
            self.moved = now
            *lines, self._pending = (self._pending + block).split(b"\n")
            self._pending = self._pending[-LONGEST_LINE:]
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, TypeError, KeyError):
            return
        if kind in ("result", "error"):
            self._said[kind] = event
        elif kind == "phase":
            phase = str(event.get("phase", ""))
            self.phase, self.progress = PHASES.get(phase, phase), None
        elif kind == "progress":
            self.progress = {"done": event.get("done_bytes"), "total": event.get("total_bytes"),
                             "item": str(event.get("item", ""))[:120]}

    def _failure(self, code: int) -> ApplianceError:
        said = self._said.get("error")
        if said is not None and code > 0:
            return by_exit_code(code)(str(said.get("what")), why=str(said.get("why", "")), do=str(said.get("do", "")))
        self._stderr.seek(0)
        lines = self._stderr.read(1 << 20).decode("utf-8", "replace").strip().splitlines()
        why = f"signal {-code}" if code < 0 else (lines[-1][:300] if lines else f"exit code {code}")
        return TransientError("preparing the model failed", why=why, do="see the journal")

    def _close(self) -> None:
        for stream in (self._child.stdout, self._stderr):
            if stream is not None:
                stream.close()


def _scratch(state: Path) -> IO[bytes]:
    """A file without a name for the child's last words; where the temp folder is full, in the state folder."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return tempfile.TemporaryFile(dir=state)


class Ending:
    """A worker on its way out: its requests may finish for `drain_s`, it is asked to end, and killed after `grace_s`.

    `done` when none of it is left. A worker that has failed already is killed at once.
    """

    def __init__(self, worker: WorkerTree, life: Life | None, *, now: float, drain_s: float, grace_s: float) -> None:
        self.asked = False
        self.done = False
        self._worker = worker
        self._life = life if life is not None and life.fault is None else None
        self._grace_s = grace_s
        self._until = now + drain_s

    def tick(self, now: float, *, requests: int) -> None:
        """`requests`: how many are in work or wait."""
        if not self.asked:
            if self._life is not None:
                self._life.tick(now)
            if self._life is not None and self._life.fault is None and requests and now < self._until:
                return
            healthy = self._life is not None and self._life.fault is None
            self.asked, self._until = True, now + (self._grace_s if healthy else 0.0)
            if healthy and self._grace_s > 0:
                self._worker.ask_to_end()
        if now >= self._until or self._worker.status() is not None:
            self.done = self._worker.kill()
