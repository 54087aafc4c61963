"""Ten faults in a row with real vLLM while clients ask: `make test-chaos` (about six minutes on two cores)."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from appliance.directories import sockets
from appliance.supervisor.worker import members
from tests.process.clients import Users, ask
from tests.served.conftest import Served, serve

pytestmark = [pytest.mark.served, pytest.mark.heavy]
PROBE_S = 8.0
REQUEST_S = 90.0
FAULTS = ("kill api", "kill engine", "segv engine", "term api", "stop engine", "stop api", "kill all", "bus engine")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "segv": signal.SIGSEGV, "bus": signal.SIGBUS}
NAMES = {"stop": "hang"}


def hurt(service: Served, fault: str) -> None:
    how, whom = fault.split()
    processes = members(service.status()["worker_pid"])
    api = [process for process in processes if process.pid == service.status()["worker_pid"]]
    engine = [process for process in processes if process.name().startswith("VLLM::Engine")]
    assert api, processes
    assert engine, processes
    for process in {"api": api, "engine": engine, "all": processes}[whom]:
        process.send_signal(SIGNALS[how])


def pss(process: psutil.Process) -> int:
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))) << 10


def test_ten_faults_in_a_row_with_clients(tmp_path: Path) -> None:
    chance = random.Random(4)
    shm = set(Path("/dev/shm").iterdir())
    service = serve(tmp_path / "home", settings=f"probe_s: {PROBE_S}\nrequest_s: {REQUEST_S}\nmax_running: 4\ntrial_s: 5\n",
                    scaled={"HEALTHY_S": 2.0})
    agent = psutil.Process(service.process.pid)
    try:
        with Users(port=service.port, count=4, limit_s=REQUEST_S + 10, seed=4, longest=200) as users:
            time.sleep(10)
            before = pss(agent)
            for number in range(10):
                fault = chance.choice(FAULTS)
                old = service.until(lambda status: bool(status["ready"]), timeout=300)
                answered = users.outcomes["answered"]
                while users.outcomes["answered"] < answered + 4:
                    time.sleep(0.05)
                time.sleep(chance.uniform(0, 3))
                hurt(service, fault)
                began = time.monotonic()
                total = sum(old["restarts_total"].values())
                seen = service.until(lambda status, total=total: sum(status["restarts_total"].values()) > total, timeout=60)  # type: ignore[misc]
                seen_s = time.monotonic() - began
                service.until(lambda status, pid=old["worker_pid"]: bool(status["ready"]) and status["worker_pid"] != pid, timeout=300)  # type: ignore[misc]
                print(f"{number} {fault:12} {seen['restarts'][-1]['fault']:20} seen after {seen_s:.1f} s, ready after {time.monotonic() - began:.1f} s",
                      flush=True)
                assert members(old["worker_pid"]) == []
                if fault.startswith("stop"):
                    assert seen["restarts"][-1]["fault"] == "hang"
                    assert seen_s < 2 * PROBE_S + 4
            time.sleep(5)
            grown = pss(agent) - before
        print(dict(users.outcomes), f"slowest {max(users.seconds):.1f} s; the agent grew by {grown / 2**20:.1f} MiB to {pss(agent) / 2**20:.1f} MiB")
        assert users.violations == []
        assert grown < 16 << 20
        assert ask(service.port, tokens=8, stream=False, limit_s=60) == "answered"
        worker = service.status()["worker_pid"]
    finally:
        code, rest = service.stop()
    assert code == 0, rest
    assert members(worker) == []
    left = [path for path in sockets(service.home / "run").iterdir() if path.is_socket()]
    assert left == []
    assert not [path for path in set(Path("/dev/shm").iterdir()) - shm if path.stat().st_uid == os.geteuid() and path.name.startswith(("sem.mp", "psm_"))]
