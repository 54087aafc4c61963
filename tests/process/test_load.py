"""The service under load: full, loading, draining, busy for long, frozen. Its words must be true and quick."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from appliance.supervisor.worker import members
from tests.process.clients import Users, ask
from tests.process.conftest import Agent

PARALLEL, RUNNING, QUEUED = 200, 4, 16


@dataclass(kw_only=True)
class Pings:
    """`/livez` and `/readyz` asked again and again: the longest wait and the words."""

    agent: Agent
    live: list[tuple[int, str]] = field(default_factory=list)
    ready: list[tuple[int, str]] = field(default_factory=list)
    slowest_s: float = 0.0

    def __enter__(self) -> Pings:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.03):
            for path, words in (("/livez", self.live), ("/readyz", self.ready)):
                reply = self.agent.get(path)
                words.append((reply.status, reply.text.strip()))
                self.slowest_s = max(self.slowest_s, reply.seconds)


def all_at_once(port: int, count: int, tokens: int) -> list[tuple[int, str, float]]:
    """Status, whole answer and seconds of `count` requests that are sent together over open connections. One thread, so
    that what is measured is the service and not this client."""
    body = json.dumps({"model": "default", "prompt": "x", "max_tokens": tokens})
    request = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
               f"Content-Length: {len(body)}\r\n\r\n{body}").encode()
    selector = selectors.DefaultSelector()
    sent: dict[socket.socket, float] = {}
    read: dict[socket.socket, bytes] = {}
    found = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        selector.register(connection, selectors.EVENT_READ)
        read[connection] = b""
    for connection in read:
        sent[connection] = time.monotonic()
        connection.sendall(request)
    first = dict.fromkeys(read, 0.0)
    while read:
        for key, _ in selector.select(60):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            with contextlib.suppress(ConnectionResetError):
                data = connection.recv(1 << 16)
                first[connection] = first[connection] or time.monotonic() - sent[connection]
                read[connection] += data
                if data:
                    continue
            text = read.pop(connection).decode()
            found.append((int(text.split(" ", 2)[1]), text, first[connection]))
            selector.unregister(connection)
            connection.close()
    return found


def test_case_077_200_parallel_requests_for_4_seats_and_16_places(agent: Agent) -> None:
    agent.settings |= {"max_running": RUNNING, "max_queued": QUEUED, "probe_s": 5}
    agent.worker_env |= {"FAKE_TOKEN_S": "0.02"}
    process = agent.serve("ok")
    agent.ready()
    grown = []
    with Pings(agent=agent) as pings:
        for _ in range(3):
            before = psutil.Process(process.pid).memory_info().rss
            answers = all_at_once(agent.port, PARALLEL, tokens=50)
            grown.append(psutil.Process(process.pid).memory_info().rss - before)
            refused = [(text, seconds) for status, text, seconds in answers if status != 200]
            assert sum(status == 200 for status, _, _ in answers) == RUNNING + QUEUED
            assert all('"completion_tokens": 50' in text for status, text, _ in answers if status == 200)
            assert {text.split(" ", 2)[1] for text, _ in refused} == {"429"}
            assert all("Retry-After: " in text for text, _ in refused)
            took = sorted(seconds for _, seconds in refused)
            print(f"refused after {statistics.median(took) * 1000:.0f} ms (median), {took[-1] * 1000:.0f} ms (slowest of {len(took)})")
            assert statistics.median(took) < 0.2
            assert took[-1] < 0.5  # 0.2 s on a machine that is not doing seven other things
    print(f"the agent grew by {[round(size / 2**20, 1) for size in grown]} MiB; slowest /livez or /readyz {pings.slowest_s * 1000:.0f} ms")
    assert grown[-1] < 2 << 20
    assert pings.slowest_s < 1
    assert set(pings.live) == {(200, "live")}
    assert {(200, "ready"), (503, "overloaded")} == set(pings.ready)
    assert agent.status()["restarts"] == []
    agent.ready()


def test_case_076_words_while_loading_full_draining_and_when_it_is_gone(agent: Agent) -> None:
    agent.settings |= {"max_running": 1, "max_queued": 1}
    agent.worker_env |= {"FAKE_TOKEN_S": "0.02"}
    process = agent.serve("slow")
    agent.until(lambda status: status["state"] == "loading")
    assert [(r.status, r.text.strip()) for r in (agent.get("/livez"), agent.get("/readyz"))] == [(200, "live"), (503, "loading")]
    refused = agent.complete()
    assert (refused.status, refused.json()["error"]["code"]) == (503, "loading")
    assert int(refused.headers["Retry-After"]) > 0
    assert agent.get("/v1/models").status == 503
    agent.ready()
    assert agent.get("/readyz").text == "ready\n"
    with ThreadPoolExecutor(2) as pool:
        two = [pool.submit(ask, agent.port, tokens=100, stream=True, limit_s=20) for _ in range(2)]
        time.sleep(0.5)
        assert (agent.get("/readyz").status, agent.get("/readyz").text) == (503, "overloaded\n")
        assert agent.complete().status == 429
        agent.command("drain")
        agent.until(lambda status: status["state"] == "draining")
        assert (agent.get("/livez").status, agent.get("/readyz").text) == (200, "draining\n")
        assert agent.complete().json()["error"]["code"] == "draining"
        # The one with a seat is answered; the one in the queue is sent away with the state's word.
        assert sorted(one.result().split(":")[0] for one in two) == ["answered", "refused"]
    agent.command("resume")
    agent.ready()
    assert agent.complete().status == 200
    process.kill()
    process.wait()
    with pytest.raises(ConnectionRefusedError):
        agent.get("/livez")


@contextlib.contextmanager
def burning() -> Iterator[None]:
    """Every core is busy twice."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_case_076_answers_within_a_second_on_a_saturated_cpu(agent: Agent) -> None:
    agent.serve("ok")
    agent.ready()
    with burning(), Pings(agent=agent) as pings:
        time.sleep(4)
    assert pings.slowest_s < 1
    assert set(pings.live) == {(200, "live")}


def test_case_075_an_open_port_behind_which_nothing_answers(agent: Agent) -> None:
    agent.settings |= {"request_s": 20}
    agent.serve("ok")
    agent.ready()
    old = agent.worker()
    agent.control("deaf")
    time.sleep(0.1)
    began = time.monotonic()
    reply = agent.complete(timeout=25)
    assert reply.status in (502, 503)  # an error that says so, not a hang
    assert reply.seconds < 10
    meanwhile = agent.complete()
    assert (meanwhile.status, "Retry-After" in meanwhile.headers) == (503, True)
    status = agent.until(lambda status: bool(status.get("ready")) and status["worker_pid"] != old[0].pid)
    print(f"seen and replaced within {time.monotonic() - began:.1f} s at a probe interval of 1 s")
    assert status["restarts"][-1]["fault"] == "hang"
    assert agent.complete().status == 200


@pytest.mark.parametrize("signal_to", ["engine", "api"])
def test_a_frozen_worker_under_load_is_replaced_within_two_probe_intervals(agent: Agent, signal_to: str) -> None:
    probe_s = 3.0
    agent.settings |= {"probe_s": probe_s, "request_s": 30, "max_running": 4}
    agent.worker_env |= {"FAKE_TOKEN_S": "0.01"}
    agent.serve("ok")
    agent.ready()
    with Users(port=agent.port, count=4, limit_s=30, longest=200) as users:
        time.sleep(3)
        processes = agent.worker()
        processes[0 if signal_to == "api" else 1].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        agent.until(lambda status: bool(status["restarts"]), timeout=20)
        seen_s = time.monotonic() - began
        agent.until(lambda status: bool(status.get("ready")) and status["worker_pid"] != processes[0].pid)
        print(f"frozen {signal_to} seen after {seen_s:.1f} s, answering again after {time.monotonic() - began:.1f} s")
        time.sleep(1)
    assert agent.status()["restarts"][-1]["fault"] == "hang"
    assert seen_s < 2 * probe_s + 1
    assert users.violations == []
    assert users.outcomes["answered"] > 10


@pytest.mark.parametrize(("prompt", "prefill_s", "what"), [
    (3500, "0.004", "2 s a step, seven steps: the cache's use moves"),
    (480, "0.02", "one step of 10 s: only CPU time moves"),
])
def test_busy_is_not_hung(agent: Agent, prompt: int, prefill_s: str, what: str) -> None:
    """A prompt that takes ten and more probe intervals, as twenty minutes are of a slow node."""
    agent.settings |= {"probe_s": 2}  # CPU time is looked at once a second
    agent.worker_env |= {"FAKE_PREFILL_S": prefill_s, "FAKE_BURN": "1"}
    agent.serve("ok")
    worker = agent.ready()["worker_pid"]
    words = set()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(agent.complete, prompt=[1] * prompt, timeout=60)
        while not answer.done():
            words.add(str(agent.status()["state"]))
            assert agent.get("/livez").status == 200
            time.sleep(0.2)
    reply = answer.result()
    assert (reply.status, reply.seconds > 8) == (200, True), what
    status = agent.ready()
    assert (status["worker_pid"], status["restarts"]) == (worker, []), what
    assert words <= {"ready", "busy"}


def test_case_063_a_stop_during_three_streams(agent: Agent) -> None:
    agent.settings |= {"drain_s": 10}
    agent.worker_env |= {"FAKE_TOKEN_S": "0.02"}
    process = agent.serve("ok")
    agent.ready()
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(ask, agent.port, tokens=120, stream=True, limit_s=20) for _ in range(3)]
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        refused = agent.complete()
        assert (refused.status, refused.json()["error"]["code"], "Retry-After" in refused.headers) == (503, "stopping", True)
        assert [stream.result() for stream in streams] == ["answered"] * 3
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert agent.worker_processes() == []


def test_case_063_a_stream_longer_than_the_drain_limit_ends_with_an_error(agent: Agent) -> None:
    agent.worker_env |= {"FAKE_TOKEN_S": "0.02"}
    process = agent.serve("ok")
    agent.ready()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(ask, agent.port, tokens=3000, stream=True, limit_s=60)
        time.sleep(0.5)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert stream.result().startswith("error: ")
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert time.monotonic() - began < 15  # drain_s 1, and the worker's own end
    assert agent.worker_processes() == []


def test_case_011_all_of_a_worker_is_gone_before_the_next_one_starts(agent: Agent) -> None:
    agent.serve("stubborn")
    old = agent.ready()["worker_pid"]
    assert len(members(old)) == 3  # one of them renamed, deaf to SIGTERM, and not bound to its parent's life
    members_then = members(old)
    min(members_then, key=lambda process: process.pid).kill()
    agent.until(lambda status: status["worker_pid"] not in (None, old))
    assert members(old) == []
    status = agent.ready()
    assert status["restarts"][-1]["fault"] == "killed"


@pytest.mark.parametrize("cycles", [4, pytest.param(20, marks=pytest.mark.heavy)])
def test_case_017_kills_leave_nothing_behind(agent: Agent, cycles: int) -> None:
    agent.scaled = {"OPERATOR_S": (0.0,)}
    shared = set(Path("/dev/shm").iterdir())
    process = agent.serve("ok")
    agent.ready()
    agent_process = psutil.Process(process.pid)
    descriptors = []
    for _ in range(cycles):
        worker = agent.worker()
        worker[0].kill()
        agent.until(lambda status, old=worker[0].pid: bool(status.get("ready")) and status["worker_pid"] != old)  # type: ignore[misc]
        descriptors.append(agent_process.num_fds())
    assert len(agent.sockets()) == 5  # agent.sock, worker.sock and the worker's own three
    assert descriptors[-1] <= descriptors[1] + 2
    assert agent.status()["restarts_total"] == {"killed": cycles}
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert agent.sockets() == []
    deadline = time.monotonic() + 10
    while (left := set(Path("/dev/shm").iterdir()) - shared) and time.monotonic() < deadline:
        time.sleep(0.5)  # other programs' come and go
    assert left == set()
