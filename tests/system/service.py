"""The installed service on one host, as an operator and the kernel see it.

Does: start it, ask it, read its status, cause a fault and measure how long it takes to notice and to answer again, and
compare what is left behind with what was there before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system import times
from tests.system.testhost.host import Host

UNIT = "appliance.service"
POLL_S = 0.05
ASK = ["curl", "-s", "-m", "60", "-w", "\\n%{http_code}", "-H", "content-type: application/json", "-d",
       '{"model": "default", "prompt": "The capital of France is", "max_tokens": 2}', "http://127.0.0.1:8000/v1/completions"]
PROCESSES = r"""for p in $(pgrep -u appliance); do
  read -r _ _ _ ppid _ sid _ </proc/$p/stat 2>/dev/null && echo "$p $ppid $sid $(tr '\0' ' ' </proc/$p/cmdline | cut -c1-60)"
done; true"""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What a worker's life may leave behind. `processes`: how many of the account, the agent's own included."""

    processes: int
    shared: tuple[str, ...]
    sockets: tuple[str, ...]
    memory_bytes: int


class Service:
    def __init__(self, host: Host) -> None:
        self.host = host

    # -- asking

    def file(self, path: str) -> Path:
        """A file of the guest, read without starting a process in it."""
        return Path(f"/proc/{self.host.init}/root{path}")

    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.file("/run/appliance/status.json").read_text()))
        except (OSError, ValueError):
            return {}

    def show(self, *names: str) -> dict[str, str]:
        out = self.host.run(["systemctl", "show", UNIT, *(f"-p{name}" for name in names)]).out
        return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)

    def state(self) -> str:
        return self.show("ActiveState")["ActiveState"]

    def ask(self) -> tuple[int, str]:
        """A real completion: (HTTP status or 0, body)."""
        out = self.host.run(ASK, timeout_s=70).out
        body, _, code = out.rpartition("\n")
        return int(code or 0), body

    def control(self, *words: str, timeout_s: float = 60) -> Any:
        return self.host.run(["applianctl", *words], timeout_s=timeout_s)

    def journal(self) -> str:
        return self.host.run(["journalctl", "-u", UNIT, "--no-pager", "-o", "cat"]).out

    def processes(self) -> list[tuple[int, int, int, str]]:
        """(pid, parent, session, command) of every process of the account, as the guest numbers them."""
        found = []
        for line in self.host.run(PROCESSES).out.splitlines():
            pid, parent, session, command = (*line.split(" ", 3), "")[:4]
            found.append((int(pid), int(parent), int(session), command))
        return found

    def agent(self) -> int:
        return int(self.show("MainPID")["MainPID"])

    def leader(self) -> int:
        return int(self.status()["worker_pid"])

    def engine(self) -> int:
        """The busiest-looking child of the API process: the one that was forked from it."""
        leader = self.leader()
        children = [pid for pid, parent, session, _ in self.processes() if parent == leader and session == leader]
        assert children, f"the worker {leader} has no child"
        return max(children, key=self._resident)

    def _resident(self, pid: int) -> int:
        return int((self.host.run(["cat", f"/proc/{pid}/statm"]).out.split() or ["0", "0"])[1])

    def memory_bytes(self) -> int:
        """What the unit holds, without page cache."""
        script = "cat /sys/fs/cgroup/memory/system.slice/appliance.service/memory.stat 2>/dev/null || cat /sys/fs/cgroup/system.slice/appliance.service/memory.stat"
        stat = dict(line.split() for line in self.host.run(script).out.splitlines() if len(line.split()) == 2)
        return int(stat.get("total_rss", stat.get("anon", 0))) + int(stat.get("total_shmem", stat.get("shmem", 0)))

    def traces(self) -> Traces:
        listing = self.host.run("ls -A /dev/shm; echo --; find /run/appliance /tmp -type s 2>/dev/null | sort").out
        shared, _, sockets = listing.partition("--\n")
        return Traces(processes=len(self.processes()), shared=tuple(shared.split()), memory_bytes=self.memory_bytes(),
                      sockets=tuple(name for name in sockets.split() if not name.rsplit("/", 1)[-1].count("-") >= 4))

    # -- doing

    def write_settings(self, text: str) -> None:
        self.host.write("/etc/appliance/appliance.yaml", text)

    def drop_in(self, name: str, text: str) -> None:
        self.host.write(f"/etc/systemd/system/{UNIT}.d/{name}.conf", text)
        self.host.run(["systemctl", "daemon-reload"], check=True)

    def misbehave(self, behaviour: str, content: str = "") -> None:
        """Tell the running fake worker what to do (tests/process/fake_worker.py)."""
        self.host.run(["sh", "-c", 'printf %s "$2" >/run/fake/.new && mv /run/fake/.new "/run/fake/$1"', "sh", behaviour, content], check=True)

    def kill(self, pid: int, signal: str) -> None:
        self.host.run(["kill", f"-{signal}", str(pid)], check=True)

    def start(self, *, timeout_s: float = 60) -> float:
        """`systemctl start`, which returns when the service says READY; seconds it took."""
        began = time.monotonic()
        done = self.host.run(["systemctl", "start", UNIT], timeout_s=timeout_s)
        assert done.rc == 0, f"{done.err}\n{self.journal()[-3000:]}"
        return time.monotonic() - began

    def begin(self) -> None:
        self.host.run(["systemctl", "start", "--no-block", UNIT], check=True)

    # -- waiting

    def wait_for(self, test: Callable[[dict[str, Any]], object], timeout_s: float, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if test(status):
                return status
            assert time.monotonic() < deadline, (
                f"{what}: not within {timeout_s:g} s; {status.get('sentence')}\n{self.journal()[-3000:]}")
            time.sleep(POLL_S)

    def wait_ready(self, timeout_s: float = 60) -> dict[str, Any]:
        return self.wait_for(lambda status: status.get("ready") and status.get("live"), timeout_s, "ready")

    def wait_unit(self, states: Sequence[str], timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while (state := self.state()) not in states:
            assert time.monotonic() < deadline, f"{state}, not {states}\n{self.journal()[-3000:]}"
            time.sleep(POLL_S)
        return state

    def until_answers(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            code, body = self.ask()
            if code == 200 and json.loads(body)["usage"]["completion_tokens"]:
                return
            assert code in (0, 200, 500, 502, 503), (code, body)
            assert time.monotonic() < deadline, f"no answer within {timeout_s:g} s ({code} {body[:200]})\n{self.journal()[-3000:]}"
            time.sleep(POLL_S)

    def survive(self, case: str, cause: Callable[[], None], *, faults: Sequence[str], detect_s: float, answer_s: float) -> dict[str, Any]:
        """Cause a fault; it must be noticed, named and healed. Returns the status afterwards; times go into the table."""
        before = self.status()
        seen = len(before.get("restarts") or [])
        cause()
        began = time.monotonic()
        noticed = self.wait_for(lambda status: len(status.get("restarts") or []) > seen, detect_s, f"{case}: noticed")
        detected = time.monotonic() - began
        self.until_answers(answer_s)
        answered = time.monotonic() - began
        last = noticed["restarts"][seen]
        times.record(case=case, fault=last["fault"], sentence=last["sentence"], detected_s=detected, answered_s=answered)
        assert last["fault"] in faults, last
        return self.wait_ready()

    def leaves_nothing(self, before: Traces, *, slack_bytes: int = 32 << 20) -> None:
        """No orphan, no segment, no socket more than before, and the memory is given back."""
        deadline = time.monotonic() + 15
        while True:
            after = self.traces()
            problems = [
                f"processes: {before.processes} -> {after.processes}: {self.processes()}" if after.processes > before.processes else "",
                f"/dev/shm: {before.shared} -> {after.shared}" if len(after.shared) > len(before.shared) else "",
                f"sockets: {before.sockets} -> {after.sockets}" if len(after.sockets) > len(before.sockets) else "",
                f"memory: {before.memory_bytes} -> {after.memory_bytes}" if after.memory_bytes > before.memory_bytes * 1.1 + slack_bytes else "",
            ]
            if not any(problems):
                return
            assert time.monotonic() < deadline, "; ".join(filter(None, problems))
            time.sleep(0.5)

    def worker_session_gone(self, session: int) -> None:
        left = [entry for entry in self.processes() if entry[2] == session]
        assert not left, f"left of worker {session}: {left}"

