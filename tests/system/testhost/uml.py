"""The same test host on a kernel of its own (User Mode Linux, Debian's package): `UmlHost` has the methods of `Host`.

Slower (a boot takes 10 to 30 s) and with one CPU, but nothing is borrowed from this machine's kernel: cgroup2 with every
controller, so that OOMPolicy=, MemoryHigh= and memory.events are real. Commands go through SSH as root. Needs ptrace,
/dev/net/tun, and apt to fetch the kernel once. Layers become part of the seed that the guest copies at its first boot.
As far as known its kernel saves AVX state only: a process in it that uses AVX-512 would be wrong, so only the fake worker
runs there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from tests.system.testhost import cgroups, network
from tests.system.testhost.base import BASE, ENV, TOP, VERSION, make_base
from tests.system.testhost.host import DEFAULTS, Host, _words
from tests.system.testhost.kernel import PR_SET_CHILD_SUBREAPER, die_with_parent, prctl, run, wait_for

KERNEL = TOP / "uml"
LINUX = KERNEL / "x/usr/bin/linux.uml"
IMAGE = TOP / f"base-{VERSION}.img"
INIT = """#!/bin/sh
# take this host's set-up from the outer machine (hostfs), then become systemd
PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
for a in $(cat /proc/cmdline); do case $a in testhost=*) d=${a#*=};; esac; done
mount -t hostfs -o "$d" none /mnt && . /mnt/seed.sh
umount /mnt
exec /sbin/init
"""


def missing() -> str | None:
    """Why this machine cannot run User Mode Linux, or None."""
    if not Path("/dev/net/tun").exists():
        return "User Mode Linux needs /dev/net/tun"
    if not LINUX.exists() and not shutil.which("apt-get"):
        return "User Mode Linux needs apt-get to fetch its kernel"
    return None


def make_image() -> None:
    """Once: Debian's UML kernel (unpacked, not installed) and an ext4 image of the base."""
    make_base()
    with open(TOP / ".image.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not LINUX.exists():
            KERNEL.mkdir(exist_ok=True)
            run("apt-get", "download", "user-mode-linux", cwd=KERNEL)
            run("dpkg-deb", "-x", next(KERNEL.glob("user-mode-linux_*.deb")), KERNEL / "x")
        if IMAGE.exists():
            return
        part = TOP / "base.img.part"
        part.unlink(missing_ok=True)
        run("truncate", "-s", "8G", part)
        # The base with an init of our own, without copying it: an overlay in a private mount namespace.
        over = TOP / "image.over"
        shutil.rmtree(over, ignore_errors=True)
        for name in ("u/usr/sbin", "w", "m"):
            (over / name).mkdir(parents=True)
        (over / "u/usr/sbin/testhost-init").write_text(INIT)
        (over / "u/usr/sbin/testhost-init").chmod(0o755)
        run("unshare", "-m", "sh", "-ec",
            f"mount -t overlay overlay -o lowerdir={BASE},upperdir={over}/u,workdir={over}/w {over}/m; "
            f"mkfs.ext4 -q -F -m 0 -E lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0 -d {over}/m {part}")
        shutil.rmtree(over)
        part.rename(IMAGE)


def supervise(name: str) -> None:
    host = UmlHost(name)
    cfg, folder = host.cfg, host.folder
    lock = open(folder / "lock", "w")  # noqa: SIM115  # held until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    cgroups.remove_groups(host.state.get("groups", []))
    groups = cgroups.make_groups(name, cfg["limits"])
    network.up(cfg, (), tap=True)
    command = [str(LINUX), f"mem={cfg['memory']}", f"ubda={folder}/disk.cow,{IMAGE}", "root=/dev/ubda", "rootfstype=ext4", "rw",
               f"umid={name}-{os.getpid()}", "con=null", "con0=null,fd:1", "ssl=null", "lsm=yama", f"eth0=tuntap,th{cfg['n']}",
               "init=/usr/sbin/testhost-init", f"testhost={folder}", "systemd.getty_auto=no", "systemd.mask=getty@tty1.service",
               "panic=-1", *cfg["cmdline"]]
    me = os.getpid()
    log = open(folder / "console.log", "ab", buffering=0)  # noqa: SIM115
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # a UML guest's processes come to us in the end
    pid = os.fork()
    if pid == 0:
        die_with_parent(me)
        cgroups.join(group.folder for group in groups)
        os.setsid()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.execve(command[0], command, {"PATH": ENV["PATH"], "HOME": str(folder), "TMPDIR": "/dev/shm"})
    state: dict[str, Any] = {"supervisor": me, "groups": groups, "init": pid}

    def save() -> None:
        (folder / "state.json.part").write_text(json.dumps(state))
        (folder / "state.json.part").rename(folder / "state.json")

    save()
    _, status = os.waitpid(pid, 0)
    cgroups.kill_all(groups)
    try:
        while os.wait():
            pass
    except ChildProcessError:
        pass
    state.update(init=0, end="poweroff" if status == 0 else "killed")
    save()


class UmlHost(Host):
    SUPERVISOR = "tests.system.testhost.uml"
    DEFAULTS: ClassVar[dict[str, Any]] = {**DEFAULTS, "memory": "1G"}
    BOOT_S = 120.0

    def create(self) -> Self:
        make_image()
        super().create()
        return self

    def image(self, name: str, size: str) -> None:
        if name != "disk.img":  # the root disk is a copy-on-write file over the base image
            super().image(name, size)

    def boot(self, timeout_s: float | None = None, *, wait: bool = True) -> Self:
        cfg, seed = self.cfg, self.folder / "seed"
        if not seed.exists():
            seed.mkdir()
            for layer in reversed(cfg["layers"]):
                run("cp", "-a", f"{layer}/.", seed)
            self.seed(seed)
        modules = next((KERNEL / "x/usr/lib/uml/modules").iterdir())
        lines = [
            "[ -e /etc/.seeded ] || { cp -a /mnt/seed/. / && touch /etc/.seeded; }",
            "hostname -F /etc/hostname", "ip link set lo up", "ip link set eth0 mtu 1400",
            f"ip addr add {self.ip}/30 dev eth0", "ip link set eth0 up", f"ip route add default via {network.gateway(cfg['n'])}",
        ]
        for source, target, mode in [(str(modules), f"/usr/lib/modules/{modules.name}", "ro"), *cfg["binds"]]:
            lines += [f"mkdir -p {shlex.quote(target)}", f"mount -t hostfs -o {mode},{shlex.quote(source)} none {shlex.quote(target)}"]
        (self.folder / "seed.sh").write_text("\n".join(lines) + "\n")
        return super().boot(timeout_s, wait=wait)

    @property
    def boots(self) -> int:
        return self.console().count("Linux version ")

    def wait_systemd(self, timeout_s: float = 120) -> None:
        def answers() -> bool:
            self.check_on()
            try:
                return self.run("systemctl is-system-running", timeout_s=10).out.strip() not in ("", "offline", "initializing")
            except subprocess.TimeoutExpired:
                return False

        wait_for(answers, timeout_s, "systemd")

    def wait_reboot(self, boots: int, timeout_s: float = 120) -> None:
        def again() -> bool:
            self.check_on()
            return self.boots > boots

        wait_for(again, timeout_s, "reboot")

    def reboot(self, timeout_s: float = 120) -> None:
        boots = self.boots
        self.run("systemctl reboot", timeout_s=timeout_s)
        self.wait_reboot(boots, timeout_s)
        self.wait_systemd(timeout_s)

    def poweroff(self, timeout_s: float = 60) -> None:
        self.run("systemctl poweroff", timeout_s=timeout_s)
        self.wait_off(timeout_s)

    def powercut(self, timeout_s: float = 10) -> None:
        """SIGKILL to the kernel: what it had not written to its disk is gone."""
        assert self.init
        cgroups.kill_all(self.state["groups"])
        self.wait_off(timeout_s)

    kill = powercut

    def commit(self, layer: str) -> None:
        raise NotImplementedError("layers are made on namespace hosts")

    def wait_off(self, timeout_s: float = 60) -> None:
        for control in self.folder.glob("ssh-*"):  # the shared SSH connections' background processes
            run("ssh", "-o", f"ControlPath={control}", "-O", "exit", "x", check=False)
        super().wait_off(timeout_s)

    def kill_command(self, process: subprocess.Popen[Any]) -> None:
        process.kill()  # sshd in the guest then hangs up on the command

    def popen(self, command: str | Sequence[object], *, user: str | None = None, env: dict[str, str] | None = None,
              **options: Any) -> subprocess.Popen[Any]:
        assert self.init
        control = f"ControlPath={self.folder}/ssh-{self.boots}"
        inside = shlex.join(["env", "-i", *(f"{key}={value}" for key, value in {**ENV, **(env or {})}.items()), *_words(command, user)])
        return subprocess.Popen(["ssh", *self.ssh_options, "-o", "ConnectTimeout=5", "-o", "ControlMaster=auto", "-o", control, "-o",
                                 "ControlPersist=30", "-o", "ServerAliveInterval=5", f"root@{self.ip}", inside],
                                start_new_session=True, **options)


if __name__ == "__main__":
    supervise(sys.argv[1])
