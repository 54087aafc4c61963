"""The worker's own control group, where systemd has delegated the unit's: `UNIT/agent` and `UNIT/worker`.

Does: on cgroup v2 move this process aside, hand the memory controller down, move a started worker into its leaf, read
what happened to memory there, end every process of it at once. Does not: set limits, or judge. Rules: where nothing is
delegated (no systemd, cgroup v1, no Delegate=, a read-only /sys/fs/cgroup) `claim` returns None and all goes on
without; nothing here raises. What the leaf adds: an OOM kill is the worker's for certain, and a process that left the
worker's session is still in its group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.probe.cgroup import parse_cgroup, parse_mountinfo, parse_stat


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """The worker's group; made by `claim`."""

    folder: Path

    def enter(self, pid: int) -> bool:
        """Move a process into the group, at once after its start: what it forks later is in it too."""
        return _write(self.folder / "cgroup.procs", str(pid))

    def events(self) -> Mapping[str, int]:
        """memory.events: `oom_kill` counts its killed processes, whosever limit was hit; `high` and `max` are counted
        where the limit stands, that is above. Empty when unknown."""
        return parse_stat(_read(self.folder / "memory.events"))

    def oom_kills(self) -> int | None:
        return self.events().get("oom_kill")

    def members(self) -> tuple[int, ...]:
        return tuple(int(line) for line in _read(self.folder / "cgroup.procs").split())

    def kill(self) -> bool:
        """SIGKILL to every process of the group at once, also to those that fork meanwhile (Linux 5.14 and newer)."""
        return _write(self.folder / "cgroup.kill", "1")


def claim(root: Path = Path("/")) -> Leaf | None:
    """Make the two groups below this process's own and move this process into `agent`. None where that cannot be."""
    unit = _own_group(root)
    if unit is None or not os.access(unit, os.W_OK | os.X_OK):
        return None
    if "memory" not in _read(unit / "cgroup.controllers").split():
        return None
    try:
        for name in ("agent", "worker"):
            (unit / name).mkdir(exist_ok=True)
    except OSError:
        return None
    # A group hands controllers down only when it has no process itself.
    if not _write(unit / "agent/cgroup.procs", str(os.getpid())):
        return None
    if not _write(unit / "cgroup.subtree_control", "+memory"):
        _write(unit / "cgroup.procs", str(os.getpid()))
        return None
    _write(unit / "cgroup.subtree_control", "+pids")
    return Leaf(folder=unit / "worker")


def _own_group(root: Path) -> Path | None:
    """The folder of this process's cgroup v2 group; None at the root of a hierarchy, or without one."""
    path = parse_cgroup(_read(root / "proc/self/cgroup")).get("")
    mounts = [mount for mount in parse_mountinfo(_read(root / "proc/self/mountinfo")) if mount.version == 2]
    if not path or path == "/" or not mounts:
        return None
    mount = mounts[0]
    inner = path.removeprefix(mount.root if mount.root != "/" else "").strip("/")
    folder = root / mount.point.lstrip("/") / inner
    return folder if inner and folder.is_dir() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True
