"""The Ansible controller: runs a playbook of the collection against throw-away hosts over SSH, and reads what came of it.

Does: write an inventory of hosts and variables, run, parse the recap. Does not: know the role. Rules: nothing of the
caller's Ansible configuration counts; the collection is the one of this checkout.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.system.testhost.base import KEY
from tests.system.testhost.host import Host

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build/ansible"
COLLECTION = ROOT / "ansible"
ADMIN = "admin"
_RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)\s+skipped=(\d+)\s+rescued=(\d+)", re.M)


@dataclass(frozen=True, kw_only=True)
class Recap:
    ok: int
    changed: int
    unreachable: int
    failed: int

    @property
    def well(self) -> bool:
        return self.failed == 0 and self.unreachable == 0


@dataclass(frozen=True, kw_only=True)
class Ran:
    """`recap`: by the host's name; `out` has everything that was printed."""

    rc: int
    out: str
    seconds: float
    recap: dict[str, Recap]

    def ok(self) -> Ran:
        assert self.rc == 0, f"{self.refusals()}\n{self.out[-2500:]}"
        assert self.recap, self.out[-2500:]
        assert all(one.well for one in self.recap.values()), self.out[-2500:]
        return self

    @property
    def changed(self) -> int:
        return sum(one.changed for one in self.recap.values())

    def changes(self) -> list[str]:
        """The tasks that changed something."""
        found, task = [], ""
        for line in self.out.splitlines():
            if name := re.match(r"(?:TASK|RUNNING HANDLER) \[(.*)\]", line):
                task = name[1]
            elif line.startswith("changed:"):
                found.append(task)
        return found

    def refusals(self) -> dict[str, str]:
        """What each host's play failed with."""
        read = json.JSONDecoder().raw_decode
        return {found[1]: str(read(self.out, found.end())[0]["msg"]) for found in re.finditer(r"^fatal: \[([^\]]*)\]: FAILED! => (?=\{)", self.out, re.M)}

    @property
    def refusal(self) -> str:
        """Of the only host that failed."""
        (line,) = self.refusals().values()
        return line


class Controller:
    """`variables` count for every host of the group `appliance`, those of `own` for the host of that name."""

    CONNECT_S = 60

    def __init__(self, folder: Path, hosts: Mapping[str, Host], *, own: Mapping[str, Mapping[str, Any]] | None = None, **variables: Any) -> None:
        self.folder, self.hosts, self.own, self.variables = folder, dict(hosts), own or {}, variables

    def inventory(self) -> Path:
        """JSON is YAML."""
        nodes = {name: {"ansible_host": host.ip, "ansible_user": ADMIN, "ansible_ssh_private_key_file": str(KEY), **self.own.get(name, {})}
                 for name, host in self.hosts.items()}
        path = self.folder / "inventory.yml"
        path.write_text(json.dumps({"all": {"children": {"appliance": {"hosts": nodes, "vars": self.variables}}}}))
        return path

    def _settings(self) -> Path:
        path = self.folder / "ansible.cfg"
        path.write_text("[defaults]\n")
        return path

    def start(self, playbook: str = "appliance.yml", *words: str, **extra: Any) -> subprocess.Popen[str]:
        """Begin a run in a session of its own, so that all of it can be ended at once."""
        book = Path(playbook) if "/" in playbook else COLLECTION / "playbooks" / playbook
        command = [str(TOOLS / "bin/ansible-playbook"), "-i", str(self.inventory()), str(book), *words]
        if extra:
            (self.folder / "extra.json").write_text(json.dumps(extra))
            command += ["--extra-vars", f"@{self.folder / 'extra.json'}"]
        env = {"PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}", "HOME": str(self.folder), "LANG": "C.UTF-8", "ANSIBLE_CONFIG": str(self._settings()),
               "ANSIBLE_COLLECTIONS_PATH": str(TOOLS / "collections"), "ANSIBLE_HOST_KEY_CHECKING": "False", "ANSIBLE_NOCOLOR": "1", "ANSIBLE_TIMEOUT": str(self.CONNECT_S),
               "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=30s -o ServerAliveInterval=10 -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
               "ANSIBLE_PIPELINING": "True", "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "no", "ANSIBLE_DEPRECATION_WARNINGS": "True"}
        return subprocess.Popen(command, env=env, cwd=self.folder, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, start_new_session=True)

    def play(self, playbook: str = "appliance.yml", *words: str, timeout_s: float = 1500, **extra: Any) -> Ran:
        began = time.monotonic()
        process = self.start(playbook, *words, **extra)
        try:
            out = process.communicate(timeout=timeout_s)[0]
        except BaseException:
            os.killpg(process.pid, 9)
            process.communicate()
            raise
        recap = {name: Recap(ok=int(ok), changed=int(changed), unreachable=int(unreachable), failed=int(failed))
                 for name, ok, changed, unreachable, failed, *_ in _RECAP.findall(out)}
        return Ran(rc=process.returncode, out=out, seconds=time.monotonic() - began, recap=recap)
