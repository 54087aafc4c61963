"""The agent's words: to standard output, which systemd's journal reads, and to its own bounded log.

Its own log, because a journal that another service floods, or that is kept in memory only, loses what an operator needs
to know. Standard output has a thread of its own: a full pipe, or a journal that stands still, must not stop the loop.
Rules: nobody has to read; lines that found no reader in time are counted, which is said when it flows again; the own
log loses no line to that; a full or read-only disk never stops the service.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from pathlib import Path

LOG_BYTES = 1024**2
"""Two files of this size are kept at most."""
LINES = 1000
"""So many may wait for a reader of standard output."""
LAST_S = 1.0
"""How long the end waits for such a reader."""


class Journal:
    """`began`: monotonic start of the agent; `stamped`: put the seconds since then before each line on the screen."""

    def __init__(self, file: Path, *, began: float, stamped: bool) -> None:
        self._file = file
        self._began = began
        self._stamped = stamped
        self._change = threading.Condition()
        self._lines: list[str] = []
        self._dropped = 0
        self._writing = False
        try:
            # By its number: a thread that holds sys.stdout's lock would keep the interpreter from ending.
            self._output: int | None = sys.stdout.fileno()
        except (OSError, ValueError, AttributeError):
            self._output = None
            return
        threading.Thread(target=self._write, args=(self._output,), name="stdout", daemon=True).start()

    def say(self, sentence: str) -> None:
        line = " ".join(sentence.split())
        stamp = f"[{time.monotonic() - self._began:6.1f} s] " if self._stamped else ""
        with self._change:
            if self._output is not None and len(self._lines) < LINES:
                self._lines.append(f"{stamp}{line}\n")
                self._change.notify_all()
            else:
                self._dropped += 1
        with contextlib.suppress(OSError):
            if self._file.exists() and self._file.stat().st_size > LOG_BYTES:
                self._file.replace(self._file.with_suffix(".log.1"))
            with open(self._file, "a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n")

    def close(self) -> None:
        """Let the last lines out, if somebody reads them."""
        with self._change:
            self._change.wait_for(lambda: not self._lines and not self._writing, timeout=LAST_S)

    def _write(self, output: int) -> None:
        while True:
            with self._change:
                self._writing = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._lines)
                text = "".join(self._lines)
                if self._dropped:
                    text += f"{self._dropped} lines are left out here, nobody read in time; {self._file} has them\n"
                self._lines, self._dropped, self._writing = [], 0, True
            with contextlib.suppress(OSError):  # nobody reads any more
                _write_all(output, text.encode("utf-8", "replace"))


def _write_all(output: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(output, data) :]
        except BlockingIOError:  # whoever shares it may have made it so
            select.select([], [output], [])
