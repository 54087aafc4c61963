"""What runs as PID 1 of the new PID namespace: build the root, pivot into it, become systemd."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.system.testhost.base import BASE, ENV
from tests.system.testhost.kernel import (
    BIND,
    NEWNS,
    NODEV,
    NOEXEC,
    NOSUID,
    PRIVATE,
    RDONLY,
    REC,
    REMOUNT,
    SHARED,
    bind,
    drop_capabilities,
    mount,
    pivot_here,
    unshare,
)

NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
LINKS = (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
         ("stderr", "/proc/self/fd/2"), ("ptmx", "pts/ptmx"))


def guest_init(cfg: dict[str, Any], folders: dict[str, str], groups: Sequence[Sequence[str]], console: str, root: Path) -> None:
    """Does not return."""
    unshare(NEWNS)  # here and not earlier: pivot_root moves every process of a mount namespace
    mount("none", "/", None, REC | PRIVATE)
    lower = ":".join([*cfg["layers"], str(BASE)])
    mount("overlay", root, "overlay", 0, f"lowerdir={lower},upperdir={folders['disk']}/upper,workdir={folders['disk']}/work")
    mount("proc", root / "proc", "proc", NOSUID | NODEV | NOEXEC)
    mount("tmpfs", root / "run", "tmpfs", NOSUID | NODEV, "mode=755,size=20%")
    (root / "run/.boot-id").write_text(f"{uuid.uuid4()}\n")  # every boot its own, for journalctl -b
    bind(root / "run/.boot-id", root / "proc/sys/kernel/random/boot_id", read_only=True)
    bind(root / "proc/sys/net", root / "proc/sys/net")  # its own network namespace: may be written
    for name in ("proc/sys", "proc/sysrq-trigger", "proc/irq", "proc/bus"):
        if (place := root / name).exists():
            mount(place, place, None, BIND | REC)
            mount(None, place, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | NOEXEC)
    mount("sysfs", root / "sys", "sysfs", RDONLY | NOSUID | NODEV | NOEXEC)
    env = {"container": "testhost", "PATH": ENV["PATH"]} | _mount_cgroups(cfg, groups, root)
    os.umask(0)
    _make_dev(root / "dev", console)
    os.umask(0o022)
    _mount_extra(cfg, folders, root)
    os.chdir(root)
    pivot_here()
    mount("none", "/", None, REC | SHARED)  # what systemd expects of its root
    socket.sethostname(cfg["name"])
    drop_capabilities()
    _become_systemd(cfg["cmdline"], env)


def _mount_cgroups(cfg: dict[str, Any], groups: Sequence[Sequence[str]], root: Path) -> dict[str, str]:
    """Unified where cgroup2 has the controllers, else hybrid; returns what PID 1's environment needs for it."""
    top = root / "sys/fs/cgroup"
    if not any(kind == "cgroup" for _, kind, _, _ in groups) or cfg["cgroup"] == "unified":
        mount("cgroup2", top, "cgroup2", NOSUID | NODEV | NOEXEC)
        return {}
    mount("tmpfs", top, "tmpfs", NOSUID | NODEV | NOEXEC, "mode=755,size=4m")
    env = {}
    for label, kind, options, _ in groups:
        place = top / (label.replace("name=", "") or "unified")
        place.mkdir()
        mount(kind, place, kind, NOSUID | NODEV | NOEXEC, options)
        if label == "memory" and cfg["oomshim"]:
            shutil.copy(cfg["oomshim"], root / "run/.oomshim.so")
            env["LD_PRELOAD"] = "/run/.oomshim.so"
    return env


def _make_dev(dev: Path, console: str) -> None:
    mount("tmpfs", dev, "tmpfs", NOSUID | NOEXEC, "mode=755,size=4m")
    for name, (major, minor) in NODES.items():
        os.mknod(dev / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
    for name, target in LINKS:
        (dev / name).symlink_to(target)
    for name in ("pts", "shm", "mqueue"):
        (dev / name).mkdir()
    mount("devpts", dev / "pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", dev / "shm", "tmpfs", NOSUID | NODEV, "mode=1777")
    mount("mqueue", dev / "mqueue", "mqueue", NOSUID | NODEV | NOEXEC)
    (dev / "console").touch()
    bind(console, dev / "console")


def _mount_extra(cfg: dict[str, Any], folders: dict[str, str], root: Path) -> None:
    for number, (path, size, kind) in enumerate(cfg["volumes"]):
        place = root / path.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        if kind == "tmpfs":
            mount("tmpfs", place, "tmpfs", NOSUID | NODEV, f"size={size},mode=755")
        else:
            bind(f"{folders['volume']}{number}", place)
    for source, target, mode in cfg["binds"]:
        place = root / target.lstrip("/")
        if Path(source).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        bind(source, place, read_only=mode != "rw")


def _become_systemd(cmdline: list[str], env: dict[str, str]) -> None:
    Path("/proc/self/oom_score_adj").write_text("0")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for wanted in (524288, hard):  # systemd's default, where CAP_SYS_RESOURCE lets us
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1024, wanted))
            break
        except ValueError:
            continue
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    terminal = os.open("/dev/console", os.O_RDWR | os.O_NOCTTY)
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    os.execve("/sbin/init", ["/sbin/init", "systemd.show_status=1", "systemd.getty_auto=no", *cmdline], env)
