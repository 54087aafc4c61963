"""Limits of the node that change while the service runs: named in its status, and planned anew when nobody is served."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from appliance.budget import GIB
from tests.process.conftest import Agent

MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def quick(agent: Agent) -> Agent:
    agent.scaled = {"limits.LOOK_S": 0.5, "limits.IDLE_S": 2.0}
    return agent


def warned(status: dict[str, Any], text: str) -> bool:
    return any(text in warning for warning in status.get("warnings", ()))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_case_046_fewer_cpus_are_planned_for_when_nobody_is_served(quick: Agent) -> None:
    process = quick.serve()
    before = quick.ready()
    quick.control("crawl", "stay")
    asking = threading.Thread(target=lambda: quick.complete(max_tokens=4000, timeout=60), daemon=True)
    asking.start()
    quick.until(lambda status: bool(status.get("running")))
    cpus = sorted(os.sched_getaffinity(0))
    psutil.Process(process.pid).cpu_affinity(cpus[:1])
    quick.until(lambda status: warned(status, f"planned anew when idle: CPUs {len(cpus)} -> 1"))
    time.sleep(3)
    assert quick.status()["worker_pid"] == before["worker_pid"]  # somebody is being answered
    (quick.home / "control" / "crawl").unlink()
    asking.join(timeout=60)
    after = quick.until(lambda status: bool(status.get("ready")) and status["worker_pid"] != before["worker_pid"])
    assert "OMP_NUM_THREADS=1" in Path(f"/proc/{after['worker_pid']}/environ").read_text().split("\0")
    assert not after["warnings"]
    assert quick.complete().status == 200


@pytest.fixture
def group() -> Iterator[Path]:
    folder = MEMORY / f"appliance-test-{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(6 * GIB))
    yield folder
    for _ in range(100):
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)


@pytest.mark.skipif(os.geteuid() != 0 or not os.access(MEMORY, os.W_OK), reason="needs a control group of its own")
def test_case_046_a_ceiling_that_moves_is_named_and_restarts_nothing_that_stays_the_same(quick: Agent, group: Path) -> None:
    process = quick.serve()
    (group / "cgroup.procs").write_text(str(process.pid))
    before = quick.ready()
    (group / "memory.limit_in_bytes").write_text(str(5 * GIB))
    quick.until(lambda status: warned(status, "planned anew when idle: memory ceiling 6.00 GiB -> 5.00 GiB"))
    after = quick.until(lambda status: not status.get("warnings"))
    assert (after["worker_pid"], after["restarts"]) == (before["worker_pid"], before["restarts"])
    quick.run("stop")
    process.wait(timeout=30)
