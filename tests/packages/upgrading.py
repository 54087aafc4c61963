"""A node with a service that is upgraded: releases in a folder, the trees of worker versions, a client that keeps asking."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.packages.node import Node
from tests.system.testhost.host import Result

TREES = "/usr/lib/appliance/workers"
# Asks again and again, one line for each answer: monotonic seconds, HTTP status, how long it took.
CLIENT = """import json, time, urllib.error, urllib.request
body = json.dumps({"model": "default", "prompt": "The capital of France is", "max_tokens": 8}).encode()
while True:
    began = time.monotonic()
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            code = answer.status if json.loads(answer.read())["choices"] else 1
    except urllib.error.HTTPError as error:
        code = error.code
    except urllib.error.URLError:
        code = 0  # no connection: nothing was accepted
    except Exception as error:
        code = 2  # broken off
    print(f"{began:.2f} {time.monotonic():.2f} {code}", flush=True)
    time.sleep(0.1 if code == 200 else 0.2)
"""


@dataclass
class Asked:
    """What the client saw. `gap_s`: the longest time between two answers."""

    codes: dict[int, int] = field(default_factory=dict)
    gap_s: float = 0.0

    @property
    def lost(self) -> int:
        """Requests that were accepted and broken off."""
        return self.codes.get(2, 0) + self.codes.get(500, 0) + self.codes.get(502, 0)


class Upgraded(Node):
    """`Node` with releases of the packages in /srv/releases/VERSION."""

    def take(self, version: str, *options: str, timeout_s: float = 300) -> Result:
        """apt takes this release: an installation, an upgrade or a downgrade."""
        done = self.host.run(f"apt-get -y -q --allow-downgrades {' '.join(options)} install /srv/releases/{version}/*.deb", timeout_s=timeout_s)
        assert done.rc == 0, done.out[-3000:] + done.err[-2000:]
        assert self.host.run(["dpkg", "--audit"]).out == ""
        return done

    def first(self, version: str, settings: str) -> None:
        """The first installation, with the model and the settings of the fake worker."""
        self.take(version)
        self.write_settings(settings)
        self.host.run("chown -R appliance:appliance /var/lib/appliance && systemctl --no-block restart appliance", check=True)

    def verify(self, *packages: str) -> str:
        """Without the settings, which are edited."""
        return "".join(line for line in super().verify(*packages).splitlines(keepends=True) if " c " not in line)

    def answers(self) -> bool:
        code, body = self.ask()
        return code == 200 and bool(json.loads(body)["choices"])

    def trees(self) -> list[str]:
        return sorted(path.name for path in self.file(TREES).iterdir() if not path.name.startswith("."))

    def target(self) -> str:
        return self.host.run(["readlink", "/usr/lib/appliance/worker"]).out.strip().removeprefix("workers/")

    def serving(self) -> str:
        """The version whose folder the running worker was started from."""
        words = self.host.run(f"tr '\\0' ' ' </proc/{self.leader()}/cmdline").out
        return words.partition(f"{TREES}/")[2].partition("/")[0]

    def record(self) -> dict[str, Any]:
        return dict(json.loads(self.file("/var/lib/appliance/state/record.json").read_text()))

    def history(self) -> list[str]:
        return [line["event"] for line in self.record()["history"]]

    def wait_kept(self, version: str, timeout_s: float = 90) -> None:
        """Ready on this version, its trial over, and nothing on the disk that is not needed."""

        def kept(status: dict[str, Any]) -> bool:
            good = self.record()["good"] if status.get("ready") and not status.get("trial") else None
            return bool(good and f"/{version}/" in good["worker_python"])

        self.wait_for(kept, timeout_s, f"{version} is kept")
        self.wait_trees([version], 20)

    def wait_trees(self, versions: list[str], timeout_s: float = 20) -> None:
        deadline = time.monotonic() + timeout_s
        while self.trees() != versions:
            assert time.monotonic() < deadline, (self.trees(), versions, self.journal()[-2000:])
            time.sleep(0.1)

    def wait_rolled_back(self, timeout_s: float = 90) -> str:
        """Ready again on the version before; the sentence that `applianctl status` shows."""
        status = self.wait_for(lambda status: status.get("rolled_back") and status.get("ready"), timeout_s, "rolled back")
        shown = self.control("status").out
        assert "last good configuration" in shown, shown
        return str(status["rolled_back"])

    @contextmanager
    def client(self) -> Iterator[Asked]:
        asked = Asked()
        self.host.write("/root/client.py", CLIENT)
        process = self.host.popen(["python3", "/root/client.py"], stdout=subprocess.PIPE, text=True)
        try:
            yield asked
        finally:
            self.host.kill_command(process)
            lines = [line.split() for line in process.communicate()[0].splitlines() if len(line.split()) == 3]
            ends = [float(end) for _, end, code in lines if code == "200"]
            asked.gap_s = max((after - before for before, after in itertools.pairwise(ends)), default=0.0)
            for _, _, code in lines:
                asked.codes[int(code)] = asked.codes.get(int(code), 0) + 1
