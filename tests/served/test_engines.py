"""Several engines in one worker, by real vLLM: `make test-engines` (two cores: two engines of one thread each).

Every engine copies the weights here, as on different NUMA nodes, though this machine may have one.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from appliance.directories import sockets
from appliance.supervisor.health import ENGINE_HEADER, counters
from appliance.supervisor.worker import members
from tests.process.clients import Users
from tests.served.conftest import Served, serve
from tests.served.test_default_model import LIMIT, generate, generated_difference

pytestmark = [pytest.mark.served, pytest.mark.heavy]
SETTINGS = """
cpu: {engines: 2}
probe_s: 4
request_s: 60
worker: {env: {APPLIANCE_COPIED: '1'}}
"""


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    service = serve(tmp_path_factory.mktemp("engines") / "home", settings=SETTINGS)
    yield service
    if service.process.poll() is None:
        service.stop()


def engines(service: Served) -> dict[int, psutil.Process]:
    found = {}
    for process in members(service.status()["worker_pid"]):
        title = " ".join(process.cmdline())
        if "EngineCore_DP" in title:
            found[int(title.split("EngineCore_DP")[1][0])] = process
    return found


def generated(service: Served) -> dict[int, float]:
    """Tokens that each engine has generated."""
    found = counters(sockets(service.home / "run") / "worker.sock")
    assert found is not None
    return {engine: marks[0] for engine, marks in found.engines.items()}


@pytest.fixture(scope="module")
def client(twins: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=twins.base_url, api_key="none", timeout=120, max_retries=0) as made:
        yield made


def test_each_engine_is_a_process_on_its_own_cpu_with_its_own_weights(twins: Served) -> None:
    found = engines(twins)
    assert sorted(found) == [0, 1]
    first, second = (found[engine].cpu_affinity() for engine in (0, 1))
    assert len(first) >= 1
    assert not set(first) & set(second)
    for process in found.values():
        assert all(psutil.Process(thread.id).cpu_affinity() == process.cpu_affinity() for thread in process.threads())
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "/prepared/" not in maps, "the weights are copied, not mapped"
    log = (twins.home / "state" / "worker.log").read_text()
    assert log.count("weights copied from") == 2
    status = twins.status()
    assert (status["engines"], status["threads"]) == (2, len(first))
    others = {process.name() for process in members(status["worker_pid"])} - {process.name() for process in found.values()}
    assert len(members(status["worker_pid"])) == 2 + 2, f"API server, resource tracker, two engines; no coordinator: {others}"


def test_it_takes_the_memory_that_was_planned(twins: Served) -> None:
    plan = json.loads(twins.applianctl("plan", "--json").stdout)
    weights = sum(line["bytes"] for line in plan["memory"] if line["item"].startswith("weights"))
    planned = sum(line["bytes"] for line in plan["memory"] if "warm-up" in line["phases"]) + weights  # the second copy
    parts = {}
    for process in members(twins.status()["worker_pid"]):
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        parts[process.name()[:15] + f" {process.pid}"] = int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))) << 10
    measured = sum(parts.values())
    print(f"planned {planned >> 20} MiB, measured {measured >> 20} MiB ({planned / measured - 1:+.1%}): "
          + ", ".join(f"{name} {size >> 20}" for name, size in parts.items()))
    assert abs(planned / measured - 1) < 0.1


def test_the_worker_listens_to_this_machine_only(twins: Served) -> None:
    pids = {process.pid for process in members(twins.status()["worker_pid"])}
    open_ = [connection for connection in psutil.net_connections("tcp") if connection.pid in pids
             and connection.status == psutil.CONN_LISTEN]
    assert {connection.laddr[0] for connection in open_} <= {"127.0.0.1", "::1"}


def test_requests_go_to_both_and_both_answer_right(twins: Served, client: openai.OpenAI, record_property: Any) -> None:
    before = generated(twins)
    prompts = [f"Chapter {n}. The {thing} was" for n, thing in enumerate(("river", "castle", "engine", "letter", "garden", "winter"), 1)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: generate(client, prompt), prompts))
    made = {engine: count - before[engine] for engine, count in generated(twins).items()}
    assert set(made) == {0, 1}
    assert min(made.values()) >= 2 * 256, f"both have a share of six requests: {made}"
    difference, count = generated_difference(twins, answers)
    record_property("two engines, mean |difference|", difference)
    print(f"{count} tokens, {made}: mean |difference| of log-probabilities {difference:.4f}")
    assert difference <= LIMIT


def test_several_choices_of_one_request_are_shared_out(twins: Served, client: openai.OpenAI) -> None:
    before = generated(twins)
    done = client.completions.create(model="default", prompt="Once upon a time", max_tokens=32, n=4, temperature=1,
                                            extra_body={"ignore_eos": True})
    assert len(done.choices) == 4
    made = {engine: count - before[engine] for engine, count in generated(twins).items()}
    assert min(made.values()) >= 32, made


def test_a_user_cannot_choose_an_engine(twins: Served, client: openai.OpenAI) -> None:
    before = generated(twins)
    for _ in range(6):
        client.completions.create(model="default", prompt="One two", max_tokens=8, extra_headers={ENGINE_HEADER: "1"},
                                         extra_body={"ignore_eos": True})
    made = {engine: count - before[engine] for engine, count in generated(twins).items()}
    assert min(made.values()) >= 8, made


@pytest.mark.parametrize(("engine", "how", "fault"), [(1, signal.SIGSTOP, "hang"), (0, signal.SIGKILL, "killed")])
def test_one_engine_hurt_and_the_whole_worker_is_replaced(twins: Served, engine: int, how: signal.Signals, fault: str) -> None:
    """Users go on asking; the other engine answers them, and must not speak for the one that is hurt."""
    old = twins.until(lambda status: bool(status["ready"]), timeout=120)
    pids = {process.pid for process in members(old["worker_pid"])}
    with Users(port=twins.port, count=3, limit_s=80, seed=engine, longest=60) as users:
        time.sleep(3)
        began = time.monotonic()
        engines(twins)[engine].send_signal(how)
        twins.until(lambda status: sum(status["restarts_total"].values()) > sum(old["restarts_total"].values()), timeout=60)
        seen_s = time.monotonic() - began
        new = twins.until(lambda status: bool(status["ready"]) and status["worker_pid"] not in (None, old["worker_pid"]), timeout=150)
        print(f"{how.name} of engine {engine}: seen after {seen_s:.1f} s, ready after {time.monotonic() - began:.1f} s")
        assert new["restarts"][-1]["fault"] == fault, new["restarts"][-1]
        assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        answered = users.outcomes["answered"]
        while users.outcomes["answered"] < answered + 4:
            time.sleep(0.1)
    assert users.violations == []
    assert len(engines(twins)) == 2


def test_a_drain_finishes_what_both_do_and_a_stop_leaves_nothing(twins: Served, client: openai.OpenAI) -> None:
    twins.until(lambda status: bool(status["ready"]), timeout=120)
    pids = {process.pid for process in members(twins.status()["worker_pid"])}

    def ask(number: int) -> int:
        done = client.completions.create(model="default", prompt=f"Story {number}:", max_tokens=200, extra_body={"ignore_eos": True})
        return done.usage.completion_tokens if done.usage else 0

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, number) for number in range(4)]
        twins.until(lambda status: status["running"] == 4)
        code, rest = twins.stop()
        assert [answer.result() for answer in answers] == [200] * 4
    assert code == 0
    assert "stopped: no worker process is left" in rest
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert json.loads((twins.home / "run" / "status.json").read_text())["state"] == "stopped"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", twins.port)) != 0
