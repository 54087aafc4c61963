"""Nodes that serve, made of one layer, and what an operator sees of them before and after a playbook.

Does: install release ONE once by the role, boot nodes from that. Does not: judge. Rules: the cheap nodes serve with the
fake worker, whose steps sleep, so that speeds compare on a busy machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.ansible import figures
from tests.ansible.controller import Controller, Ran
from tests.packages.node import Node
from tests.system.testhost import base
from tests.system.testhost.host import Host

ONE, TWO, DIES = "0.1.0~deb12", "0.2.0~deb12", "0.3.0~deb12"
"""The release that is installed at first, the next one, and one whose worker does not start."""
KEY_TEXT = "sk-appl-sentinel0123456789abcdef"
# Nodes with real vLLM share this machine's CPUs: one is measured at a time, and a loss is believed only where it is large.
SERVED = {
    "appliance_config": {"listen": {"host": "0.0.0.0"}, "trial_s": 20, "drain_s": 20, "context": 1024, "max_running": 4, "memory": {"reserve": "64M"}},
    "appliance_api_key": KEY_TEXT, "appliance_verify_expect": "Paris", "appliance_wait_s": 400,
    "rollout_bench_at_once": 1, "rollout_bench_tokens": 48, "rollout_loss_pct": 60, "rollout_kept": "canary"}
BOOT_S = 240.0
"""A boot ends when the service has started."""
ASK = ["curl", "-s", "-m", "60", "-w", "\\n%{http_code}", "--unix-socket", "/run/appliance/agent.sock", "-H", "content-type: application/json",
       "-d", '{"model": "default", "prompt": "The capital of France is", "max_tokens": 2}', "http://node/v1/completions"]
"""On the socket root needs no key."""
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
        body, _, code = self.hosts[name].run(ASK, timeout_s=70).out.rpartition("\n")
        return Seen(version=self.version(name), config=node.file("/etc/appliance/appliance.yaml").read_text(),
                    model=str(node.status().get("digest")), worker_pid=int(node.status().get("worker_pid") or 0),
                    answers=code == "200" and bool(json.loads(body)["choices"][0]["text"]))

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


def sources(repository: Path) -> dict[str, Any]:
    """The role's variables for the repository that `booted` binds."""
    return {"appliance_repository_uri": "file:/srv/repository", "appliance_repository_key": (repository / "appliance.asc").read_text()}


def booted(stack: ExitStack, names: Sequence[str], layer: str, make_host: Callable[..., Host], repository: Path) -> dict[str, Host]:
    hosts = {name: make_host(layers=(layer,), binds=((str(repository), "/srv/repository"),)) for name in names}
    for host in hosts.values():
        host.BOOT_S = BOOT_S
        stack.enter_context(host)
    return hosts


@contextmanager
def fleet(folder: Path, names: Sequence[str], layer: str, make_host: Callable[..., Host], repository: Path, variables: dict[str, Any]) -> Iterator[Fleet]:
    with ExitStack() as stack:
        found = Fleet(folder, booted(stack, names, layer, make_host, repository), **variables)
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


def note(drill: str, ran: Ran) -> None:
    """Seconds of a run for the documentation."""
    said = next((text for text in ran.refusals().values() if text.startswith("rollout stopped")), "")
    figures.keep(drill, seconds=round(ran.seconds), changed=ran.changed, sentence=said)
