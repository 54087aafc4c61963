"""Faults in a row while clients keep asking: nobody hangs, everybody gets an answer or an error, and it answers at the end."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.process.clients import Users
from tests.process.conftest import Agent

SCALED = {"HEALTHY_S": 0.5, "RETRY_S": (0.2, 0.5, 1.0), "OPERATOR_S": (0.0, 0.2, 0.5, 1.0), "LAST_RETRY_S": 1.0}
"""On a node a worker counts as healthy after ten minutes, and what fails again and again waits for up to a minute."""
REQUEST_S = 20.0
ENDS = ("die-9", "die-segv", "raise", "leave", "api-9", "api-segv", "api-term", "kill api", "kill engine", "kill all")
# A worker that stands still before its first answer is given minutes: these wait until it has answered.
STILL = ("hang", "freeze-engine", "freeze-api", "deaf", "stop engine", "stop api")
WRONG = ("error", "garbage", "close-mid-stream 2", "crawl 2", "log-flood 4", "load-9", "load-segv", "crash")
BY_RUNG = ("die-ill", "oom-log")
"""These step down the ladder; one that comes again before the service was healthy would end it, as it should."""
AGENT_GROWTH_BYTES = 12 << 20


def hurt(agent: Agent, fault: str) -> None:
    """Drop a control file, or send a signal from outside."""
    name, _, rest = fault.partition(" ")
    if name not in ("kill", "stop"):
        agent.control(name, rest)
        return
    processes = agent.worker()
    wanted = processes[:1] if rest == "api" else processes[1:2] if rest == "engine" else processes
    for process in wanted:
        try:
            process.send_signal(signal.SIGKILL if name == "kill" else signal.SIGSTOP)
        except psutil.NoSuchProcess:
            continue


def faults(seed: int, count: int) -> list[tuple[str, bool, float]]:
    """Which fault, whether the service is answering again before it, and how long after that."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        kind = chance.choices((ENDS, STILL, WRONG, BY_RUNG), (5, 3, 3, 1))[0]
        waits = kind in (STILL, BY_RUNG) or chance.random() < 0.6
        made.append((chance.choice(kind), waits, chance.uniform(0.1, 1.5)))
    return made


def answers(agent: Agent) -> None:
    """Wait until it says that it is healthy, and it is."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        agent.until(lambda status: bool(status.get("ready")) and time.time() - (status.get("ready_at") or 0) > 0.6, timeout=60)
        if agent.complete(timeout=REQUEST_S).status == 200:
            return
        time.sleep(0.2)
    raise AssertionError(f"it does not answer: {agent.status()}")


def resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def run(agent: Agent, *, seed: int, count: int) -> None:
    agent.scaled = SCALED
    agent.settings |= {"request_s": REQUEST_S, "trial_s": 1, "max_running": 4}
    agent.worker_env |= {"FAKE_TOKEN_S": "0.01"}
    shm = set(Path("/dev/shm").iterdir())
    process = agent.serve("ok")
    agent.ready()
    with Users(port=agent.port, count=4, limit_s=REQUEST_S + 5, seed=seed, longest=150, also=("garbage",)) as users:
        time.sleep(1.5)
        before = resident(process.pid)
        for number, (fault, well, pause_s) in enumerate(faults(seed, count)):
            if well:
                answers(agent)
            time.sleep(pause_s)
            hurt(agent, fault)
            print(f"{number:3} {fault:18} {'ready' if well else 'any'}  {agent.status()['sentence']}")
        for left in (agent.home / "control").iterdir():
            left.unlink()
        time.sleep(3)  # the last fault must be seen before what is found counts
        answers(agent)
        grown = resident(process.pid) - before
    status = agent.status()
    print(dict(users.outcomes), f"longest {max(users.seconds):.1f} s, agent grew by {grown / 2**20:.1f} MiB, {status['restarts_total']}")
    assert users.violations == []
    assert users.outcomes["answered"] > count
    assert grown < AGENT_GROWTH_BYTES
    assert sum(status["restarts_total"].values()) >= count // 3
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, ""), out
    assert agent.worker_processes() == []
    assert agent.sockets() == []
    assert not [path for path in set(Path("/dev/shm").iterdir()) - shm if path.stat().st_uid == os.geteuid() and path.name.startswith("sem.mp")]


def test_ten_faults_in_a_row(agent: Agent) -> None:
    run(agent, seed=4, count=10)


@pytest.mark.heavy
def test_fifty_faults_in_a_row(agent: Agent) -> None:
    run(agent, seed=1, count=50)
