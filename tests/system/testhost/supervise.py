"""The process behind one host that is on: `python -m tests.system.testhost.supervise NAME`.

It mounts the disks, makes the network, starts the guest's PID 1, starts it anew after a reboot, and writes
hosts/NAME/state.json. init's death tells what happened: SIGHUP = reboot, SIGINT = poweroff. SIGUSR1 here is a power
cut: all processes frozen, the disks' dirty pages and journal dropped, then SIGKILL.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.system.testhost import cgroups, network
from tests.system.testhost.guest import guest_init
from tests.system.testhost.host import Host
from tests.system.testhost.kernel import (
    NEWCGROUP,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUTS,
    PRIVATE,
    REC,
    die_with_parent,
    mount,
    run,
    unshare,
    wait_for,
)

DEVICES = ("c *:* m", "b *:* m", "c 1:3 rwm", "c 1:5 rwm", "c 1:7 rwm", "c 1:8 rwm", "c 1:9 rwm", "c 5:* rwm", "c 136:* rwm")
"""Those containers usually have: a guest cannot open this machine's disks."""
EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, (2).to_bytes(4, "little")


class Supervisor:
    def __init__(self, name: str) -> None:
        self.host = Host(name)
        self.cfg, self.folder = self.host.cfg, self.host.folder
        self.lock = open(self.folder / "lock", "w")  # noqa: SIM115  # held until this process ends
        fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.own = [group.folder for group in cgroups.hierarchies()]
        self.log = open(self.folder / "console.log", "ab", buffering=0)  # noqa: SIM115
        cgroups.remove_groups(self.host.state.get("groups", []))  # of an earlier, killed supervisor
        self.groups = cgroups.make_groups(name, self.cfg["limits"], DEVICES)
        self.state: dict[str, Any] = {"supervisor": os.getpid(), "groups": self.groups, "boots": 0}
        self.cut = False
        self.disks = [str(self.folder / "disk")]

    def save(self, **values: Any) -> None:
        self.state |= values
        part = self.folder / "state.json.part"
        part.write_text(json.dumps(self.state))
        part.rename(self.folder / "state.json")

    def run(self) -> None:
        self.save()
        outer = os.open("/proc/self/ns/net", os.O_RDONLY)
        unshare(NEWNS | NEWNET)
        mount("none", "/", None, REC | PRIVATE)
        network.up(self.cfg, ("nsenter", f"--net=/proc/{os.getpid()}/fd/{outer}"))
        run("mount", "-o", "loop", self.folder / "disk.img", self.folder / "disk")
        for number, (_, _, kind) in enumerate(self.cfg["volumes"]):
            if kind != "tmpfs":
                self.disks.append(str(self.folder / f"volume{number}"))
                run("mount", "-o", "loop", self.folder / f"volume{number}.img", self.disks[-1])
        for name in ("upper", "work"):
            Path(self.disks[0], name).mkdir(exist_ok=True)
        Path(self.disks[0], "upper").chmod(0o755)
        self.host.seed(Path(self.disks[0], "upper"))
        self.master, slave = pty.openpty()
        self.console = os.ttyname(slave)
        wake = os.pipe2(os.O_NONBLOCK)
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "cut", True))
        signal.set_wakeup_fd(wake[1], warn_on_full_buffer=False)
        while self.one_boot(wake[0]) == "reboot":
            pass

    def one_boot(self, wake: int) -> str:
        """Start the guest and wait for its end; returns how it ended."""
        me, (r, w) = os.getpid(), os.pipe()
        middle = os.fork()
        if middle == 0:
            os._exit(self.in_child(me, lambda: in_pid_namespace(self, lambda: self.guest(w))))
        os.close(w)
        init = int(os.read(r, 32) or b"0")
        os.close(r)
        self.save(init=init, boots=self.state["boots"] + 1, end=None)
        watch = os.pidfd_open(middle)
        poll = select.poll()
        for descriptor in (self.master, watch, wake):
            poll.register(descriptor, select.POLLIN)
        done = False
        while not done:
            for descriptor, _ in poll.poll():
                if descriptor == self.master:
                    self.log.write(os.read(self.master, 65536))
                elif descriptor == wake:
                    os.read(wake, 512)
                elif descriptor == watch:
                    done = True
            if self.cut and not done:
                self.cut_power(init)
                done = True
        _, status = os.waitpid(middle, 0)
        os.close(watch)
        code = os.waitstatus_to_exitcode(status) - 128
        ends = {signal.SIGHUP: "reboot", signal.SIGINT: "poweroff", signal.SIGKILL: "killed"}
        end = "powercut" if self.cut else ends.get(code, f"exit {code + 128}")
        self.log.write(f"\ntesthost: guest ended: {end}\n".encode())
        self.save(init=0, end=end)
        return end

    def in_child(self, parent: int, do: Callable[[], int]) -> int:
        try:
            die_with_parent(parent)
            return do()
        except BaseException as error:
            self.log.write(f"testhost: {error!r} {getattr(error, 'filename', None)}\n".encode())
            return 120

    def guest(self, w: int) -> int:
        def init() -> int:
            os.write(w, os.fsencode(os.readlink("/proc/self")))  # noqa: PTH115  # our pid as this machine's /proc has it
            folders = {"disk": self.disks[0], "volume": str(self.folder / "volume")}
            guest_init(self.cfg, folders, self.groups, self.console, self.folder / "root")
            return 0

        cgroups.join(group.folder for group in self.groups)
        # Leave them afterwards: a process of another PID namespace reads as pid 0 in the guest's groups, and systemd
        # then fails with EIO whenever it lists its root group.
        return in_pid_namespace(self, init, NEWUTS | NEWIPC | NEWCGROUP, lambda: cgroups.join(self.own))

    def cut_power(self, init: int) -> None:
        """Stop everything at one instant, then lose what was not flushed."""
        unified = next((group.folder for group in self.groups if group.kind == "cgroup2"), None)
        if unified:
            Path(unified, "cgroup.freeze").write_text("1")
            wait_for(lambda: "frozen 1" in Path(unified, "cgroup.events").read_text(), 5, "freeze")
        for disk in self.disks:
            descriptor = os.open(disk, os.O_RDONLY)
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH)
            os.close(descriptor)
        os.kill(init, signal.SIGKILL)
        if unified:
            Path(unified, "cgroup.freeze").write_text("0")


def in_pid_namespace(supervisor: Supervisor, do: Callable[[], int], flags: int = 0, after: Callable[[], None] = lambda: None) -> int:
    """Run `do` as PID 1 of a new namespace and wait for it. Two of them, one in the other: the outer one takes the
    guest down with the supervisor, because systemd clears its parent-death signal."""
    unshare(NEWPID | flags)
    child = os.fork()
    if child == 0:
        os._exit(supervisor.in_child(0, do))
    after()
    while (got := os.wait())[0] != child:
        pass
    return 128 + os.WTERMSIG(got[1]) if os.WIFSIGNALED(got[1]) else os.WEXITSTATUS(got[1])


if __name__ == "__main__":
    Supervisor(sys.argv[1]).run()
