"""Three nodes that serve, made of one layer, and what an operator sees of them before and after a playbook.

Does: install release ONE once by the role, boot nodes from that, keep an apt repository of several releases. Does not:
judge. Rules: the cheap nodes serve with the fake worker, whose steps sleep, so that speeds compare on a busy machine.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.ansible.controller import Controller, Ran
from tests.packages.node import Node
from tests.system.testhost import base
from tests.system.testhost.host import Host

NAMES = ("web1", "web2", "web3")
BOOT_S = 240.0
"""A boot ends when the service has started."""
TIMES = Path(__file__).parents[2] / "build/system/fleet.json"
RECORD = "/var/lib/appliance-fleet/rollout/record.json"
PENDING = "/var/lib/appliance-fleet/rollout/pending.json"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rollout may change on a node, and whether it serves."""

    version: str
    config: str
    model: str
    answers: bool
    worker_pid: int


class Fleet(Controller):
    """A controller whose hosts serve. The variables are those that the nodes were installed with."""

    CONNECT_S = 20  # some of these hosts are off

    def node(self, name: str) -> Node:
        return Node(self.hosts[name])

    def seen(self, name: str) -> Seen:
        node = self.node(name)
        code, body = node.ask()
        return Seen(version=self.version(name), config=node.file("/etc/appliance/appliance.yaml").read_text(),
                    model=str(node.status().get("digest")), worker_pid=int(node.status().get("worker_pid") or 0),
                    answers=code == 200 and bool(json.loads(body)["choices"][0]["text"]))

    def all_seen(self) -> dict[str, Seen]:
        return {name: self.seen(name) for name in self.hosts}

    def version(self, name: str) -> str:
        return self.hosts[name].run(["dpkg-query", "-W", "-f", "${Version}", "appliance-worker"]).out

    def record(self, name: str) -> dict[str, Any]:
        path = self.node(name).file(RECORD)
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def rows(self, **extra: Any) -> dict[str, dict[str, Any]]:
        """The status table's lines by host."""
        path = self.folder / "status.json"
        path.unlink(missing_ok=True)
        self.play("status.yml", status_json=str(path), **extra)
        return {row["host"]: row for row in json.loads(path.read_text())}

    def wait_ready(self) -> None:
        for name in self.hosts:
            self.node(name).wait_ready(BOOT_S)


@contextmanager
def fleet(folder: Path, layer: str, make_host: Callable[..., Host], repository: Path, variables: dict[str, Any]) -> Iterator[Fleet]:
    with ExitStack() as stack:
        hosts = {name: make_host(layers=(layer,), binds=((str(repository), "/srv/repository"),)) for name in NAMES}
        for host in hosts.values():
            host.BOOT_S = BOOT_S
            stack.enter_context(host)
        found = Fleet(folder, hosts, **variables)
        found.wait_ready()
        yield found


@contextmanager
def installed(folder: Path, make_host: Callable[..., Host], repository: Path, variables: dict[str, Any], **extra: Any) -> Iterator[str]:
    """A layer with the service installed by the role, its trial kept."""
    name = f"d-fleet-{uuid4().hex[:6]}"
    with make_host(binds=((str(repository), "/srv/repository"),)) as host:
        Controller(folder, {"web": host}, **variables).play(**extra).ok()
        Node(host).wait_for(lambda status: status.get("ready") and not status.get("trial"), 120, "kept")
        host.poweroff()
        host.commit(name)
    try:
        yield name
    finally:
        shutil.rmtree(base.LAYERS / name, ignore_errors=True)


def batches(ran: Ran) -> list[str]:
    """The hosts in the order in which their batches began."""
    begun = ran.out.split("TASK [Begin the batch]")[1:]
    return [line.split("[")[1].split("]")[0] for part in begun for line in part.split("TASK [")[0].splitlines() if line.startswith("ok: [")]


def told(ran: Ran) -> str:
    """The one sentence of a run that was stopped."""
    assert ran.rc != 0, ran.out[-4000:]
    sentences = [text for text in ran.refusals().values() if text.startswith("rollout stopped")]
    assert len(set(sentences)) == 1, ran.out[-6000:]
    return sentences[0]


def note(case: str, ran: Ran) -> None:
    """Seconds of a run for the documentation, with this machine's load then."""
    TIMES.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(TIMES.read_text()) if TIMES.is_file() else {}
    said = next((text for text in ran.refusals().values() if text.startswith("rollout stopped")), "")
    rows[case] = {"seconds": round(ran.seconds), "changed": ran.changed, "load": round(os.getloadavg()[0], 1), "sentence": said}
    TIMES.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
