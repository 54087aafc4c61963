"""What only a kernel of its own can show, with the fake worker: cgroup v2's memory controller under systemd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.service import UNIT, Service
from tests.system.testhost import uml
from tests.system.testhost.uml import UmlHost

GROUP = f"/sys/fs/cgroup/system.slice/{UNIT}"


class Remote(Service):
    """A UML guest's files are read over SSH, not through /proc."""

    def status(self) -> dict[str, object]:
        import json

        try:
            return dict(json.loads(self.host.run(["cat", "/run/appliance/status.json"]).out))
        except ValueError:
            return {}


@pytest.fixture(scope="module")
def small(fake_layer: str) -> Iterator[Remote]:
    if reason := uml.missing():
        pytest.skip(reason)
    with UmlHost("uml-system", layers=[fake_layer], memory="3G") as made:
        made.run("chown -R appliance:appliance /var/lib/appliance; systemctl daemon-reload; systemd-tmpfiles --create", check=True)
        yield Remote(made)


def events(service: Service, group: str) -> dict[str, int]:
    out = service.host.run(["cat", f"{GROUP}/{group}/memory.events"]).out
    return {name: int(value) for name, value in (line.split() for line in out.splitlines())}


def test_only_the_child_is_killed_when_memory_runs_out(small: Remote) -> None:
    small.drop_in("memory", "[Service]\nMemoryMax=1100M\n")
    small.start(timeout_s=120)
    small.wait_ready(60)
    agent = small.agent()
    after = small.survive("cgroup v2 OOM of the worker alone", lambda: small.misbehave("leak", "300"), faults=("oom-kill",), detect_s=60, answer_s=90)
    assert small.agent() == agent
    assert after["rung"] != "full"
    assert small.show("ActiveState", "Result", "NRestarts") == {"ActiveState": "active", "Result": "success", "NRestarts": "0"}
    assert events(small, "worker")["oom_kill"] >= 1
    assert events(small, "agent")["oom_kill"] == 0
    small.control("reset")
    small.host.run(["systemctl", "stop", UNIT], timeout_s=100)


def test_the_leaf_comes_again_with_every_agent(small: Remote) -> None:
    small.host.run(f"rm -f /etc/systemd/system/{UNIT}.d/memory.conf; systemctl daemon-reload")
    small.start(timeout_s=120)
    for _ in range(2):
        agent, worker = small.agent(), small.wait_ready(60)["worker_pid"]
        assert small.host.run(["cat", f"{GROUP}/agent/cgroup.procs"]).out.split()[0] == str(agent)
        assert str(worker) in small.host.run(["cat", f"{GROUP}/worker/cgroup.procs"]).out.split()
        small.kill(agent, "KILL")
        small.wait_for(lambda status, old=agent: status.get("ready") and status["agent"]["pid"] != old, 60, "the next agent")
    small.host.run(["systemctl", "reload", UNIT], check=True)
    small.host.run(["systemctl", "stop", UNIT], check=True, timeout_s=100)
    assert small.host.run(["ls", GROUP]).rc != 0, "the groups are left"


def test_case_048_a_soft_limit_that_freezes_the_worker_is_named(small: Remote) -> None:
    small.drop_in("memory", "[Service]\nMemoryHigh=1000M\nMemoryMax=2G\n")
    small.start(timeout_s=120)
    status = small.wait_ready(60)
    assert status["ceiling_bytes"] <= 1000 << 20, "the lower of both limits is planned for"
    small.survive("MemoryHigh freeze (48)", lambda: small.misbehave("leak", "500"), faults=("memory-stall",), detect_s=120, answer_s=120)
    small.host.run(["systemctl", "stop", UNIT], timeout_s=100)
