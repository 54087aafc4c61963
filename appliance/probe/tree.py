"""A host's file system below a root folder: `/` itself, or a captured machine.

Paths are written as the host sees them (`/proc/cpuinfo`) and looked up below the root. A missing or unreadable file
is None, an unreadable folder is empty: the caller turns that into *unknown*. Nothing is written.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LONGEST_BYTES = 16 << 20
"""No file of /proc or /sys that is read here is longer; a captured folder may hold anything."""
PIECE_BYTES = 1 << 20
MOST_CPUS = 65536


@dataclass(frozen=True, kw_only=True)
class Tree:
    root: Path

    def path(self, path: str) -> Path:
        """Where the host's absolute `path` lies; `..` cannot leave the root."""
        return self.root / os.path.normpath("/" + path).lstrip("/")

    def read(self, path: str) -> str | None:
        data = self.head(path, LONGEST_BYTES)
        return data.decode("utf-8", "replace") if data is not None else None

    def read_int(self, path: str) -> int | None:
        text = self.read(path)
        try:
            return int(text) if text is not None else None
        except ValueError:
            return None

    def head(self, path: str, size: int) -> bytes | None:
        """The first `size` bytes; None when it is no regular file that can be read (a FIFO would wait for ever)."""
        try:
            descriptor = os.open(self.path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        with os.fdopen(descriptor, "rb") as file:
            try:
                return _read(file, size)
            except OSError:
                return None

    def names(self, path: str) -> list[str]:
        """Sorted names in a folder."""
        try:
            return sorted(entry.name for entry in self.path(path).iterdir())
        except OSError:
            return []

    def is_file(self, path: str) -> bool:
        try:
            return self.path(path).is_file()
        except OSError:
            return False


def _read(file: BinaryIO, size: int) -> bytes:
    """Up to `size` bytes, piece by piece: /proc/sys refuses to be asked for megabytes at once."""
    found = b""
    while len(found) < size and (piece := file.read(min(PIECE_BYTES, size - len(found)))):
        found += piece
    return found


def parse_cpu_list(text: str | None) -> tuple[int, ...] | None:
    """The kernel's list format `0-3,8,10-11` as sorted CPU numbers; () for an empty list, None for anything else."""
    if text is None:
        return None
    cpus: set[int] = set()
    try:
        for part in text.strip().split(","):
            if part:
                first, dash, last = part.partition("-")
                if int(last or first) >= MOST_CPUS:
                    return None
                cpus.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        return None
    return tuple(sorted(cpus))
