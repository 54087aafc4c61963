"""One throw-away host: make it, boot it, run things in it, cut its power, destroy it.

    with Host("web1", volumes=[("/var/lib/appliance", "64M", "ext4")], layers=["service"]) as host:
        host.run("systemctl is-active appliance").out
        host.reboot(); host.powercut(); host.boot()

`layers` are folders that `commit` made of another host. Rules: nothing of a host is left after `destroy`, also when
the test run was killed (the next `with` sweeps); commands run in systemd's own cgroup and without the capabilities that
reach beyond the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.system.testhost import cgroups, network
from tests.system.testhost.base import ENV, HOSTS, KEY, LAYERS, TOP, make_base, make_shim
from tests.system.testhost.kernel import drop_capabilities, process_id, run, wait_for

REPOSITORY = Path(__file__).parents[3]
DEFAULTS: dict[str, Any] = {"layers": [], "binds": [], "volumes": [], "disk": "8G", "limits": {}, "cgroup": "auto",
                            "oomshim": True, "cmdline": [], "owner": None}
# What a command does first in the guest: move to PID 1's cgroups.
JOIN = """for d in /sys/fs/cgroup /sys/fs/cgroup/*; do
  for f in $d/init.scope/cgroup.procs $d/cgroup.procs; do { echo 0 >$f; } 2>/dev/null && break; done
done; exec "$@" """
NOT_IN_A_LAYER = ("etc/machine-id", "etc/hostname", "etc/hosts", "var/log/journal")
SIGRTMIN_POWEROFF, SIGRTMIN_REBOOT = 4, 5


class Result(NamedTuple):
    rc: int
    out: str
    err: str

    def ok(self) -> Result:
        if self.rc:
            raise RuntimeError(f"exit {self.rc}\n{self.out}{self.err}")
        return self


class Host:
    """`config`: see DEFAULTS; binds are (source, target[, "rw"]), volumes (path, size[, "tmpfs"])."""

    SUPERVISOR = "tests.system.testhost.supervise"
    DEFAULTS = DEFAULTS
    BOOT_S = 30.0

    def __init__(self, name: str, **config: Any) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
            raise ValueError(f"bad host name {name!r}")
        if unknown := set(config) - set(self.DEFAULTS):
            raise TypeError(f"unknown options {unknown}")
        self.name, self.folder, self.config = name, HOSTS / name, config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def cfg(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "config.json").read_text()))

    @property
    def state(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / "state.json").read_text()))
        except FileNotFoundError:
            return {}

    @property
    def ip(self) -> str:
        return network.address(self.cfg["n"])

    @property
    def boots(self) -> int:
        """How often the present supervisor has started the guest."""
        return int(self.state.get("boots", 0))

    @property
    def on(self) -> bool:
        try:
            with open(self.folder / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def init(self) -> int:
        pid = self.state.get("init")
        if not pid or not self.on:
            raise RuntimeError(f"{self.name} is off")
        return int(pid)

    def console(self) -> str:
        path = self.folder / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # -- its life

    def create(self) -> Self:
        make_base()
        HOSTS.mkdir(parents=True, exist_ok=True)
        with open(TOP / ".alloc.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.folder.mkdir()
            taken = {json.loads(path.read_text())["n"] for path in HOSTS.glob("*/config.json")}
            number = next(n for n in range(1, 255) if n not in taken and not Path(f"/sys/class/net/th{n}").exists())
            cfg = {**self.DEFAULTS, **self.config, "name": self.name, "n": number, "machine_id": uuid.uuid4().hex}
            cfg["binds"] = [(str(Path(b[0]).resolve()), b[1], b[2] if len(b) > 2 else "ro") for b in cfg["binds"]]
            cfg["oomshim"] = cfg["oomshim"] and make_shim()
            cfg["layers"] = [str(LAYERS / layer) for layer in cfg["layers"]]
            cfg["volumes"] = [(v[0], v[1], v[2] if len(v) > 2 else "ext4") for v in cfg["volumes"]]
            (self.folder / "config.json").write_text(json.dumps(cfg, indent=1))
        for name in ("disk", "root", *(f"volume{n}" for n in range(len(cfg["volumes"])))):
            (self.folder / name).mkdir()
        self.image("disk.img", cfg["disk"])
        for n, (_, size, kind) in enumerate(cfg["volumes"]):
            if kind != "tmpfs":
                self.image(f"volume{n}.img", size)
        return self

    def image(self, name: str, size: str) -> None:
        path = self.folder / name
        run("truncate", "-s", size, path)
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0", path)

    def seed(self, upper: Path) -> None:
        """This host's own files, written below the guest before its first boot only."""
        if (upper / "etc/machine-id").exists():
            return
        (upper / "etc").mkdir(exist_ok=True)
        cfg = self.cfg
        (upper / "etc/machine-id").write_text(f"{cfg['machine_id']}\n")
        (upper / "etc/hostname").write_text(f"{self.name}\n")
        (upper / "etc/hosts").write_text(f"127.0.0.1 localhost\n{network.address(cfg['n'])} {self.name}\n::1 localhost\n")

    def boot(self, timeout_s: float | None = None, *, wait: bool = True) -> Self:
        timeout_s = timeout_s or self.BOOT_S
        if self.on:
            raise RuntimeError(f"{self.name} is on")
        self.wait_off(timeout_s)
        with open(self.folder / "supervisor.log", "ab") as log:
            process = subprocess.Popen([sys.executable, "-m", self.SUPERVISOR, self.name], stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=log, start_new_session=True, cwd=REPOSITORY,
                                       env={**os.environ, "TESTHOST_DIR": str(TOP), "PYTHONPATH": str(REPOSITORY)})
        self._process = process

        def started() -> bool:
            return process.poll() is not None or (self.state.get("supervisor") == process.pid and bool(self.state.get("init")))

        wait_for(started, timeout_s, "boot")
        if process.poll() is not None:
            log_text = (self.folder / "supervisor.log").read_text()
            raise RuntimeError(f"{self.name}: supervisor ended\n{log_text[-2000:]}{self.console()[-2000:]}")
        self.wait_systemd(timeout_s)
        if wait:
            self.wait_ready(timeout_s)
        return self

    def wait_systemd(self, timeout_s: float = 30) -> None:
        """Until systemd takes commands; it may still be starting services."""

        def ready() -> bool:
            self.check_on()
            pid = self.state.get("init")
            return bool(pid) and Path(f"/proc/{pid}/root/run/systemd/private").exists()

        wait_for(ready, timeout_s, "systemd")

    def wait_ready(self, timeout_s: float = 30) -> str:
        """Until systemd has finished starting; returns its verdict (running or degraded)."""
        deadline = time.monotonic() + timeout_s
        self.wait_systemd(timeout_s)
        while True:
            done = self.run(["systemctl", "is-system-running", "--wait"], timeout_s=max(1, deadline - time.monotonic()))
            word = done.out.strip()
            if word in ("running", "degraded", "maintenance") or time.monotonic() > deadline:
                return word
            time.sleep(0.05)

    def check_on(self) -> None:
        if (self._process is not None and self._process.poll() is not None) or not self.on:
            raise RuntimeError(f"{self.name} went off: {self.state.get('end')}\n{self.console()[-2000:]}")

    def wait_off(self, timeout_s: float = 60) -> None:
        """Until it is off and nothing of it is left running or mounted."""

        def gone() -> bool:
            if (self._process is not None and self._process.poll() is None) or self.on:
                return False
            for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
                try:
                    if f"{self.folder}/" in backing.read_text():
                        return False
                except OSError:
                    continue
            return True

        wait_for(gone, timeout_s, f"{self.name} off")
        cgroups.remove_groups(self.state.get("groups", []))
        network.down(self.cfg["n"])

    def reboot(self, timeout_s: float = 120) -> None:
        """An orderly reboot from outside; `systemctl reboot` inside does the same. Does not wait for the services."""
        boots = self.boots
        os.kill(self.init, signal.SIGRTMIN + SIGRTMIN_REBOOT)
        self.wait_reboot(boots, timeout_s)
        self.wait_systemd(timeout_s)

    def wait_reboot(self, boots: int, timeout_s: float = 60) -> None:
        def again() -> bool:
            self.check_on()
            return self.boots > boots and bool(self.state.get("init"))

        wait_for(again, timeout_s, "reboot")

    def poweroff(self, timeout_s: float = 60) -> None:
        os.kill(self.init, signal.SIGRTMIN + SIGRTMIN_POWEROFF)
        self.wait_off(timeout_s)

    def kill(self, timeout_s: float = 10) -> None:
        """SIGKILL to PID 1: every process is gone at once; nothing written is lost."""
        os.kill(self.init, signal.SIGKILL)
        self.wait_off(timeout_s)

    def powercut(self, timeout_s: float = 10) -> None:
        """As `kill`, and what was not yet fsync'ed is lost too."""
        assert self.init
        os.kill(self.state["supervisor"], signal.SIGUSR1)
        self.wait_off(timeout_s)

    def commit(self, layer: str) -> None:
        """Keep what this powered-off host's disk holds as a layer: `Host(name, layers=[layer])` starts from it."""
        if self.on:
            raise RuntimeError(f"{self.name} is on")
        target = LAYERS / layer
        LAYERS.mkdir(exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        drop = " ".join(f"{target}/{name}" for name in NOT_IN_A_LAYER)
        disk = self.folder / "disk"
        run("unshare", "-m", "sh", "-ec", f"mount -o loop {disk}.img {disk}; cp -a {disk}/upper {target}; rm -rf {drop}")

    def destroy(self) -> None:
        if not self.folder.exists():
            return
        state = self.state
        cgroups.kill_all(state.get("groups", []))
        for who, grace_s in (("init", 3.0), ("supervisor", 0.0)):  # without its guest the supervisor ends by itself
            if self.on and state.get(who):
                try:
                    os.kill(state[who], signal.SIGKILL)
                    wait_for(lambda: not self.on, grace_s, "off")
                except (ProcessLookupError, TimeoutError):
                    continue
        if (self.folder / "config.json").exists():
            self.wait_off(10)
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        sweep()
        self.config["owner"] = process_id(os.getpid())
        self.create()
        try:
            return self.boot()
        except BaseException:
            self.destroy()
            raise

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.destroy()

    # -- its use

    def popen(self, command: str | Sequence[object], *, user: str | None = None, env: dict[str, str] | None = None,
              **options: Any) -> subprocess.Popen[Any]:
        """Start a command in the guest. A string goes to bash."""
        words = _words(command, user)
        enter = ["nsenter", "-t", str(self.init), "-m", "-u", "-i", "-n", "-p", "-C", "--", "sh", "-c", JOIN, "sh"]
        return subprocess.Popen([*enter, *words], env={**ENV, **(env or {})}, start_new_session=True,
                                preexec_fn=drop_capabilities, **options)

    def run(self, command: str | Sequence[object], *, input: str | bytes | None = None, timeout_s: float = 120, check: bool = False,
            binary: bool = False, user: str | None = None, env: dict[str, str] | None = None) -> Result:
        text: dict[str, Any] = {} if binary else {"text": True, "errors": "replace"}
        process = self.popen(command, user=user, env=env, stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, **text)
        try:
            out, err = process.communicate(input, timeout_s)
        except BaseException:
            self.kill_command(process)
            process.communicate()
            raise
        result = Result(process.returncode, out, err)
        return result.ok() if check else result

    def kill_command(self, process: subprocess.Popen[Any]) -> None:
        """All of its process group but nsenter itself, which then reaps the command: no zombie stays in the guest."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, group = int(stat.parent.name), int(stat.read_text().rsplit(")", 1)[1].split()[2])
                if group == process.pid and pid != process.pid:
                    os.kill(pid, signal.SIGKILL)
            except (OSError, IndexError):
                continue

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1" && chmod "$2" "$1"'
        self.run(["sh", "-c", script, "sh", path, f"{mode:o}"], input=text, check=True)

    def push(self, source: Path, target: str) -> None:
        """Copy a file, or a folder's content, into a folder of the guest."""
        what = ["-C", str(source), "."] if source.is_dir() else ["-C", str(source.parent), source.name]
        tar = subprocess.run(["tar", "--owner=0", "--group=0", "-cf", "-", *what], stdout=subprocess.PIPE, check=True).stdout
        self.run(["mkdir", "-p", target], check=True)
        self.run(["tar", "-C", target, "-xf", "-"], input=tar, binary=True).ok()

    @property
    def ssh_options(self) -> list[str]:
        return ["-i", str(KEY), "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
                "-o", "LogLevel=ERROR", "-o", "BatchMode=yes"]


def _words(command: str | Sequence[object], user: str | None) -> list[str]:
    words = ["bash", "-c", command] if isinstance(command, str) else [str(word) for word in command]
    return ["runuser", "-u", user, "--", *words] if user else words


def sweep() -> None:
    """Destroy what a killed test run left: hosts made by a `with` statement of a process that is no more."""
    for path in HOSTS.glob("*/config.json"):
        try:
            owner = json.loads(path.read_text()).get("owner")
        except (OSError, ValueError):
            continue
        if owner and process_id(owner[0]) != owner:
            with contextlib.suppress(FileNotFoundError):  # another test run sweeps at the same time
                Host(path.parent.name).destroy()
