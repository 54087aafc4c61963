"""The folders of the service: one agent per runtime folder, the worker's places made and swept, sizes measured.

Rules: what an earlier worker left in temp and socket folders goes before the next one starts; caches of the present and
the previous host fingerprint are kept; measuring never stops the service.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from appliance import disk
from appliance.directories import AGENT_SOCKET, Directories, ensure
from appliance.errors import TransientError
from appliance.launch import Places

KEPT_CACHES = 2
"""The present host fingerprint's cache and the previous one."""


@contextlib.contextmanager
def only_agent(runtime: Path) -> Iterator[None]:
    """Hold the runtime folder's lock. Raises TransientError when another agent has it, naming its pid."""
    path = runtime / "agent.lock"
    with disk.mapped("cannot take the service's lock", path):
        lock = open(path, "a+")  # noqa: SIM115  # closed below, after the service has ended
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise TransientError("the service is running already", why=f"pid {holder} holds {lock.name}",
                                 do="run `applianctl status`") from None
        with contextlib.suppress(OSError):  # the pid is a courtesy to whoever finds the lock taken
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), str(os.getpid()).encode())
        yield


def prepare(places: Places, cache: Path, *, fingerprint: str) -> None:
    """Make the worker's folders; forget what earlier workers left in them, and caches of older hosts."""
    tmp = ensure(Path(places.tmp))
    for leftover in tmp.iterdir():
        # Inductor's precompiled header is 154 MB and slow to make: keep it.
        if not leftover.name.startswith("torchinductor_"):
            remove(leftover)
    for leftover in ensure(Path(places.sockets), mode=0o700).iterdir():
        if leftover.is_socket() and leftover.name != AGENT_SOCKET:
            remove(leftover)
    caches = sorted((path for path in cache.iterdir() if is_fingerprint(path.name)),
                    key=lambda path: path.stat().st_mtime, reverse=True)
    os.utime(places.cache)
    for old in [path for path in caches if path.name != fingerprint][KEPT_CACHES - 1 :]:
        remove(old)


def sweep_sockets(folder: Path) -> None:
    """Remove the worker's sockets after its end."""
    with contextlib.suppress(OSError):
        for leftover in folder.iterdir():
            if leftover.is_socket() and leftover.name != AGENT_SOCKET:
                remove(leftover)


def is_fingerprint(name: str) -> bool:
    return len(name) == 12 and all(c in "0123456789abcdef" for c in name)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def folder_bytes(folder: Path) -> int:
    """Sizes of the regular files below; what cannot be read counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
    return total


def tree_bytes(processes: list[psutil.Process]) -> int:
    """Proportional set size of some processes: shared pages are counted once."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{process.pid}/smaps_rollup") as rollup:
            total += next((int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:")), 0)
    return total


def sizes(directories: Directories) -> dict[str, int]:
    return {"cache_bytes": folder_bytes(directories.cache), "store_bytes": folder_bytes(directories.store)}
