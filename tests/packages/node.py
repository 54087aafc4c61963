"""One host and its packages: install, remove, purge, and what is on its disk before and after."""

from __future__ import annotations

import json
import time

from tests.system.service import Service
from tests.system.testhost.host import Result

ALL = ("appliance", "appliance-worker", "appliance-model-smollm2")
SITE = """# A test host's own boot id is a mount over /proc, which ProtectProc= replaces by a new /proc.
[Service]
BindReadOnlyPaths=-/run/.boot-id:/proc/sys/kernel/random/boot_id
"""
OURS = ("/etc/appliance", "/usr/lib/appliance", "/usr/share/appliance", "/usr/share/doc/appliance", "/var/lib/appliance",
        "/var/cache/appliance", "/var/log/appliance", "/run/appliance", "/usr/bin/applianctl")


class Node(Service):
    """`Service` with apt. No command asks anything: there is no terminal."""

    def apt(self, *words: str, timeout_s: float = 300) -> Result:
        return self.host.run(["apt-get", "-y", "-q", *words], timeout_s=timeout_s)

    def install(self, *packages: str, options: tuple[str, ...] = ()) -> float:
        """Seconds that it took. It must succeed whatever becomes of the service."""
        began = time.monotonic()
        self.apt("update").ok()
        done = self.apt("install", *options, *packages)
        assert done.rc == 0, done.out[-3000:] + done.err[-2000:]
        assert self.host.run(["dpkg", "--audit"]).out == ""
        return time.monotonic() - began

    def files(self) -> dict[str, str]:
        """What dpkg does not know or what may be ours, below the folders that an installation may touch: path -> kind."""
        found = self.host.run(["find", "/etc", "/usr", "/opt", "/srv", "/var/lib", "/var/cache", "/var/log", "/run/appliance", "/home", "/root",
                               "-xdev", "-not", "-path", "/var/lib/dpkg/*", "-not", "-path", "/var/lib/apt/*", "-not", "-path", "/var/cache/*/*",
                               "-not", "-path", "/var/log/*/*", "-printf", "%y %p\n"]).out
        return {line[2:]: line[0] for line in found.splitlines()}

    def reason(self) -> str:
        """What `applianctl status` says, in its first line."""
        done = self.control("status")
        return str(done.out + done.err).strip().splitlines()[0]

    def verify(self, *packages: str) -> str:
        return self.host.run(["dpkg", "--verify", *packages]).out

    def installed_mb(self) -> dict[str, float]:
        out = self.host.run(["dpkg-query", "-W", "-f", "${Package} ${Installed-Size}\n", "appliance*"]).out
        return {name: round(int(size) / 1024, 1) for name, size in (line.split() for line in out.splitlines() if len(line.split()) == 2)}

    def answers_paris(self) -> bool:
        code, body = self.ask()
        return code == 200 and "Paris" in str(json.loads(body)["choices"][0]["text"])
