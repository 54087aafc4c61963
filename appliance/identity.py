"""Which process is meant: pid, start in clock ticks since boot, and the boot's id.

A pid alone is given again to later processes, and a start time on the wall clock moves when the clock is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def identity(pid: int | None = None) -> dict[str, Any]:
    """The identity of a living process (default: this one). Raises OSError when there is none with that pid."""
    number = os.getpid() if pid is None else pid
    return {"pid": number, "ticks": _ticks(number), "boot": _boot()}


def alive(known: Any) -> bool:
    """Whether the process that this identity was taken of still lives; False for anything that is no identity.

    One that has ended and was not reaped by its parent yet does not live.
    """
    if not isinstance(known, Mapping) or not _is_pid(known.get("pid")) or known.get("boot") != _boot():
        return False
    try:
        fields = _stat(known["pid"])
        return fields[0] not in "ZX" and int(fields[19]) == known.get("ticks")
    except (OSError, ValueError, IndexError):
        return False


def reused(known: Mapping[str, Any]) -> bool:
    """Whether the pid of a dead process now belongs to another one, or was taken in another boot."""
    if not _is_pid(known.get("pid")) or known.get("boot") != _boot():
        return True
    try:
        return bool(_ticks(known["pid"]) != known.get("ticks"))
    except OSError:
        return False


def _is_pid(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 < value < 1 << 31


def _ticks(pid: int) -> int:
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """The fields of stat(5) from the third on, the state; the name in field 2 may hold spaces and parentheses."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
