"""System calls that Python has no name for, and two small ways to wait and to run a program."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE, SHARED = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 1 << 20
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 24, 36
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DROPPED_CAPABILITIES = (16, 17, 25, 32, 33, 34, 35, 36, 37)
"""Kernel modules, raw I/O, the clock, other LSMs, the kernel log, suspend, the audit stream: not for a guest."""
libc = ctypes.CDLL(None, use_errno=True)


def _ok(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _bytes(value: object) -> bytes | None:
    return None if value is None else os.fsencode(str(value))


def mount(source: object, target: object, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    done = libc.mount(_bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data))
    _ok(done, f"mount {kind or ''} {source} {target}")


def bind(source: object, target: object, *, read_only: bool = False) -> None:
    mount(source, target, None, BIND | (0 if read_only else REC))
    if read_only:
        mount(None, target, None, REMOUNT | BIND | RDONLY)


def unshare(flags: int) -> None:
    _ok(libc.unshare(flags), "unshare")


def prctl(operation: int, value: int) -> None:
    _ok(libc.prctl(operation, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def pivot_here() -> None:
    """Make the working directory the root and let the old root go."""
    _ok(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _ok(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def die_with_parent(parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def drop_capabilities() -> None:
    """For PID 1 and, because nsenter leaves capabilities alone, for every command: else `date -s` in the guest sets
    this machine's clock. In force from the next exec on."""
    for number in DROPPED_CAPABILITIES:
        prctl(PR_CAPBSET_DROP, number)


def run(*command: object, check: bool = True, **options: Any) -> str:
    """Output and errors of a program of this machine."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if check and done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: exit {done.returncode}\n{done.stdout}")
    return str(done.stdout)


def wait_for(test: Callable[[], T], timeout_s: float, what: str, *, step_s: float = 0.02) -> T:
    """The first true value of `test`; TimeoutError names what was waited for."""
    deadline = time.monotonic() + timeout_s
    while not (value := test()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(step_s)
    return value


def process_id(pid: int) -> list[int] | None:
    """[pid, start time]: tells a process from a later one with the same number."""
    try:
        return [pid, int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])]
    except OSError:
        return None
