"""The agent's words: to standard output, which systemd's journal reads, and to its own bounded log.

Its own log, because a journal that another service floods, or that is kept in memory only, loses what an operator needs
to know. Rules: nobody has to read; a full or read-only disk never stops the service.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

LOG_BYTES = 1024**2
"""Two files of this size are kept at most."""


class Journal:
    """`began`: monotonic start of the agent; `stamped`: put the seconds since then before each line on the screen."""

    def __init__(self, file: Path, *, began: float, stamped: bool) -> None:
        self._file = file
        self._began = began
        self._stamped = stamped

    def say(self, sentence: str) -> None:
        line = " ".join(sentence.split())
        stamp = f"[{time.monotonic() - self._began:6.1f} s] " if self._stamped else ""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.write(f"{stamp}{line}\n")
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            if self._file.exists() and self._file.stat().st_size > LOG_BYTES:
                self._file.replace(self._file.with_suffix(".log.1"))
            with open(self._file, "a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n")
