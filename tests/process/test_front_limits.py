"""The front door under too much of everything: requests, bytes, connections, slow clients, clients that leave."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from appliance.board import Gate
from appliance.front import body as body_module
from appliance.front import connection as connection_module
from appliance.front import desk as desk_module
from appliance.front import door as door_module
from appliance.settings import Settings
from tests.process.house import COMPLETION, House, built

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def house() -> Iterator[House]:
    with built() as made:
        yield made


def connected(house: House) -> socket.socket:
    return socket.create_connection(("127.0.0.1", house.port), timeout=20)


def posted(house: House, **changes: Any) -> socket.socket:
    """A client that has sent its request and does nothing more."""
    client = connected(house)
    body = json.dumps(COMPLETION | changes).encode()
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    return client


def everything(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(65536):
        data += piece
    client.close()
    return data


def everything_until_idle(client: socket.socket) -> bytes:
    """A whole answer with a length, on a connection that stays open."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, _, rest = data.partition(b"\r\n\r\n")
    length = int(next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")).split(b":")[1])
    while len(rest) < length:
        rest += client.recv(65536)
    client.close()
    return head + b"\r\n\r\n" + rest


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_case_077_200_requests_against_4_running_and_16_waiting(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.02")
    house.open()
    body = json.dumps(COMPLETION | {"max_tokens": 40})
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("crowd.py")), str(house.port), "200", body],
                          capture_output=True, text=True, timeout=60, check=True)
    answers = json.loads(done.stdout)
    refused = [answer for answer in answers if answer["status"] != 200]
    assert len(refused) == 180
    assert {(answer["status"], answer["code"]) for answer in refused} == {(429, "overloaded")}
    assert all(1 <= int(answer["retry_after"]) <= 60 for answer in refused)
    slowest = max(answer["seconds"] for answer in refused)
    assert slowest < 1.0, slowest  # 0.2 s on a machine of its own; the tests' share their cores with others
    house.until(lambda: house.board.traffic.running == 0)
    traffic = house.board.traffic
    assert (traffic.accepted_total, traffic.answered_total, traffic.refused_total, traffic.failed_total) == (20, 20, 180, 0)
    assert house.ask("GET", "/readyz").status == 200


def test_case_076_a_full_queue_is_live_and_not_ready(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.05")
    house.open(Settings(max_queued=1), max_running=1, max_queued=1)
    clients = [posted(house, max_tokens=20) for _ in range(2)]
    house.until(lambda: house.ask("GET", "/readyz").body == b"overloaded\n")
    assert house.ask("GET", "/livez").status == 200
    assert [status_of(everything_until_idle(client)) for client in clients] == [200, 200]
    assert house.ask("GET", "/readyz").status == 200


def test_the_queue_is_first_come_first_served(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.02")
    house.open(max_running=1)
    ended: list[int] = []

    def ask(number: int) -> None:
        assert house.complete(max_tokens=5).status == 200
        ended.append(number)

    with ThreadPoolExecutor(8) as pool:
        for number in range(8):
            pool.submit(ask, number)
            house.until(lambda number=number: house.board.traffic.accepted_total > number or number in ended)
    assert ended == sorted(ended)


def test_at_most_max_running_reach_the_worker(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.02")
    house.open(max_running=2)
    with ThreadPoolExecutor(10) as pool:
        asking = [pool.submit(house.complete, max_tokens=30) for _ in range(10)]
        most = 0.0
        while not all(one.done() for one in asking):
            most = max(most, house.metric("vllm:num_requests_running") + house.metric("vllm:num_requests_waiting"))
            time.sleep(0.02)
    assert {one.result().status for one in asking} == {200}
    assert most == 2


def test_a_client_that_leaves_while_running_stops_the_work(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.05")
    house.open()
    for stream in (True, False):
        client = posted(house, max_tokens=4000, stream=stream)
        house.until(lambda: house.metric("vllm:num_requests_running") == 1)
        client.close()
        house.until(lambda: house.metric("vllm:num_requests_running") == 0, timeout=3)
    house.until(lambda: house.board.traffic.running == 0)
    assert house.board.traffic.failed_total == 0  # nobody's fault


def test_a_client_that_leaves_the_queue_is_never_asked_for(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.02")
    house.open(max_running=1)
    first = posted(house, max_tokens=200)
    house.until(lambda: house.board.traffic.running == 1)
    leaving = posted(house, max_tokens=4000)
    last = posted(house, max_tokens=5)
    house.until(lambda: house.board.traffic.queued == 2)
    leaving.close()
    house.until(lambda: house.board.traffic.queued == 1)
    assert status_of(everything_until_idle(first)) == 200
    assert status_of(everything_until_idle(last)) == 200
    house.until(lambda: house.board.traffic.running == 0)
    assert house.metric("vllm:request_success_total") == 2


def test_a_shut_gate_ends_the_waiting_and_lets_the_running_finish(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.03")
    house.open(max_running=1)
    running = posted(house, max_tokens=60)
    house.until(lambda: house.board.traffic.running == 1)
    waiting = posted(house)
    house.until(lambda: house.board.traffic.queued == 1)
    house.board.gate = Gate(open=False, reason="draining", retry_after_s=9)
    answer = everything_until_idle(waiting)
    assert status_of(answer) == 503
    assert b"Retry-After: 9" in answer
    assert b'"draining"' in answer
    house.until(lambda: house.board.traffic.refused_total == 1)
    assert house.board.traffic.failed_total == 0  # turned away, not failed
    assert status_of(everything_until_idle(running)) == 200


def test_waiting_has_an_end(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "WAIT_S", 0.3)
    house.work(FAKE_TOKEN_S="0.05")
    house.open(max_running=1)
    running = posted(house, max_tokens=40)
    house.until(lambda: house.board.traffic.running == 1)
    answer = house.complete()
    assert (answer.status, answer.code) == (503, "overloaded")
    assert answer.headers["Retry-After"]
    assert status_of(everything_until_idle(running)) == 200


@pytest.mark.parametrize("stream", [True, False])
def test_no_request_outlives_request_s(house: House, stream: bool) -> None:
    house.work(FAKE_TOKEN_S="0.1")
    house.open(Settings(request_s=1.0))
    answer = house.complete(max_tokens=4000, stream=stream)
    assert 0.9 < answer.seconds < 3
    if stream:
        assert answer.status == 200
        assert b'"code": "timeout"' in answer.body.split(b"\n\n")[-2]
    else:
        assert (answer.status, answer.code) == (504, "timeout")
    house.until(lambda: house.metric("vllm:num_requests_running") == 0, timeout=3)
    house.until(lambda: house.board.traffic.failed_total == 1)


def test_case_075_a_worker_that_hangs_ends_as_an_error_when_it_is_killed(house: House) -> None:
    house.work()
    house.open()
    (house.control / "hang").touch()
    time.sleep(0.2)
    client = posted(house)
    house.until(lambda: house.board.traffic.running == 1)
    time.sleep(0.5)
    assert house.worker is not None
    house.worker.kill()
    answer = everything_until_idle(client)
    assert status_of(answer) == 502


# ---- bodies --------------------------------------------------------------------------------------------------------


def test_a_body_that_is_announced_too_large_is_refused_unread(house: House) -> None:
    house.open(Settings(max_body=1000))
    with connected(house) as client:
        client.sendall(HEAD + b"Content-Length: 1001\r\n\r\n")
        answer = everything_until_idle(client)
    assert status_of(answer) == 413
    assert b'"too_large"' in answer


def test_a_body_that_grows_too_large_is_cut(house: House) -> None:
    house.work()
    house.open(Settings(max_body=100_000))
    with connected(house) as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"c350\r\n" + b"x" * 50_000 + b"\r\n")
        client.sendall(b"c351\r\n" + b"x" * 50_001 + b"\r\n0\r\n\r\n")
        answer = client.recv(65536)
    assert status_of(answer) == 413
    assert house.metric("vllm:request_success_total") == 0
    assert house.complete().status == 200


def test_a_large_body_comes_through_whole_and_expect_is_answered(house: House) -> None:
    house.work()
    house.open()
    body = json.dumps(COMPLETION | {"ignored": "x" * 3_000_000}).encode()
    with connected(house) as client:
        client.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert status_of(client.recv(65536)) == 200


@pytest.mark.parametrize(("extra", "status"), [(b"Content-Encoding: gzip\r\nContent-Length: 10\r\n", 415),
                                               (b"Content-Length: abc\r\n", 400), (b"X: " + b"y" * 20_000 + b"\r\n", 400)])
def test_headers_that_are_refused(house: House, extra: bytes, status: int) -> None:
    house.open()
    with connected(house) as client:
        client.sendall(HEAD + extra + b"\r\n")
        assert status_of(client.recv(65536)) == status


def test_a_slow_body_holds_no_seat_and_ends(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_S", 1.0)
    house.work()
    house.open(max_running=1)
    slow = connected(house)
    slow.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    time.sleep(0.3)
    assert house.board.traffic.queued == 0
    assert house.complete().status == 200  # the only seat is free
    assert status_of(slow.recv(65536)) == 408
    slow.close()


def test_bodies_that_wait_are_bounded_together(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "HELD_BYTES", 1_000_000)
    house.work(FAKE_TOKEN_S="0.05")
    house.open(Settings(max_body=700_000), max_running=1)
    running = posted(house, max_tokens=60)
    house.until(lambda: house.board.traffic.running == 1)
    first = posted(house, ignored="x" * 600_000)
    house.until(lambda: house.board.traffic.queued == 1)
    time.sleep(0.3)
    answer = house.complete(ignored="x" * 600_000)
    assert (answer.status, answer.code) == (503, "overloaded")
    assert status_of(everything_until_idle(running)) == 200
    assert status_of(everything_until_idle(first)) == 200
    assert house.complete(ignored="x" * 600_000).status == 200


# ---- connections ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD])
def test_a_connection_that_sends_no_request_is_closed(house: House, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection_module, "HEADERS_S", 0.5)
    house.open()
    with connected(house) as client:
        client.sendall(sent)
        began = time.monotonic()
        assert client.recv(65536) == b""
        assert 0.3 < time.monotonic() - began < 3


def test_headers_byte_by_byte_do_not_buy_time(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "HEADERS_S", 0.5)
    house.open()
    with connected(house) as client:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            for byte in b"GET /livez HTTP/1.1\r\n" + b"X-Slow: 1\r\n" * 1000:
                client.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - began < 5


def test_an_idle_connection_is_closed_after_its_time(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "KEEP_ALIVE_S", 0.5)
    house.open()
    with connected(house) as client:
        for _ in range(2):
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = client.recv(65536)
            while not answer.endswith(b"live\n"):
                answer += client.recv(65536)
            assert status_of(answer) == 200
        began = time.monotonic()
        assert client.recv(65536) == b""
        assert time.monotonic() - began < 4


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n", HEAD], ids=["nothing", "half of it", "no body"])
def test_connections_held_open_shut_nobody_out(house: House, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """The one that has waited longest for its request goes; one that is being answered never does."""
    monkeypatch.setattr(connection_module, "MAX_CONNECTIONS", 4)
    house.work(FAKE_TOKEN_S="0.05")
    house.open()
    running = posted(house, max_tokens=40)
    house.until(lambda: house.board.traffic.running == 1)
    held = [connected(house) for _ in range(3)]
    for client in held:
        client.sendall(sent)
    time.sleep(0.2)
    assert status_of(everything_or_idle(house)) == 200
    assert held[0].recv(65536) == b"", "the oldest was closed"
    assert status_of(everything_until_idle(running)) == 200
    for client in (*held, running):
        client.close()


def test_one_connection_too_many_is_told_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "MAX_CONNECTIONS", 3)
    house.work(FAKE_TOKEN_S="0.05")
    house.open()
    kept = [posted(house, max_tokens=60) for _ in range(3)]
    house.until(lambda: house.board.traffic.running == 3)
    answer = everything(connected(house))
    assert status_of(answer) == 503
    assert b"Retry-After: 5" in answer
    assert house.ask("GET", "/livez", own=True).status == 200  # the operator's way in is not counted with them
    kept.pop().close()
    house.until(lambda: status_of(everything_or_idle(house)) == 200)
    for client in kept:
        client.close()


def everything_or_idle(house: House) -> bytes:
    with connected(house) as client:
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return client.recv(65536)


def test_a_client_that_takes_nothing_is_cut_off(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "STALLED_S", 1.0)
    house.work(FAKE_TOKEN_S="0.0001")
    house.open()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", house.port))
    body = json.dumps(COMPLETION | {"stream": True, "max_tokens": 4000}).encode()
    for _ in range(20):  # pipelined, so that more is answered than all buffers hold
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    house.until(lambda: house.board.traffic.running == 1)
    house.until(lambda: house.board.traffic.running == 0 and house.board.traffic.accepted_total >= 1, timeout=20)
    time.sleep(1)
    assert house.board.traffic.running == 0
    assert house.complete().status == 200
    client.close()


def test_a_crowd_leaves_no_memory_and_no_descriptors_behind(house: House) -> None:
    house.work()
    house.open()
    process = psutil.Process()
    body = json.dumps(COMPLETION)

    def crowd() -> None:
        subprocess.run([sys.executable, str(Path(__file__).with_name("crowd.py")), str(house.port), "200", body],
                       capture_output=True, timeout=60, check=True)

    crowd()
    house.until(lambda: house.board.traffic.running == 0)
    before = process.memory_info().rss, process.num_fds()
    for _ in range(3):
        crowd()
    house.until(lambda: house.board.traffic.running == 0)
    time.sleep(2.5)  # kept connections to the worker are dropped after 2 s
    after = process.memory_info().rss, process.num_fds()
    assert after[0] - before[0] < 8 << 20
    assert after[1] <= before[1]


def test_stop_lets_running_requests_finish_and_refuses_new_ones(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.03")
    door = house.open()
    running = posted(house, max_tokens=60)
    house.until(lambda: house.board.traffic.running == 1)
    stopping = threading.Thread(target=door.stop, kwargs={"grace_s": 20})
    stopping.start()
    house.until(lambda: house.ask("GET", "/readyz").body == b"stopping\n")
    assert house.complete().code == "stopping"
    assert status_of(everything_until_idle(running)) == 200
    stopping.join(10)
    assert not stopping.is_alive()
    with pytest.raises(OSError, match="refused"):
        connected(house)
    assert not (house.home / "agent.sock").exists()


@pytest.mark.parametrize("stream", [True, False])
def test_stop_ends_what_takes_longer_than_the_grace(house: House, stream: bool) -> None:
    house.work(FAKE_TOKEN_S="0.05")
    door = house.open()
    running = posted(house, max_tokens=4000, stream=stream)
    house.until(lambda: house.board.traffic.running == 1)
    began = time.monotonic()
    door.stop(grace_s=0.5)
    assert time.monotonic() - began < 4
    answer = everything(running)
    assert status_of(answer) == (200 if stream else 503)
    assert b'"code": "stopping"' in answer


def test_bodies_that_never_come_hold_no_place(house: House) -> None:
    house.open()
    with contextlib.ExitStack() as stack:
        for _ in range(24):
            client = stack.enter_context(connected(house))
            client.sendall(HEAD + b"Content-Length: 500\r\n\r\n{")
        time.sleep(0.5)
        with connected(house) as client:
            client.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(client.recv(65536)) == 200


@pytest.mark.parametrize("line", [b"\x00\x01\r\n\r\n", b"GET /\xff HTTP/9.9\r\n\r\n", HEAD + b"Origin: http://[::1\r\n\r\n"])
def test_nonsense_is_answered_in_our_own_words(house: House, line: bytes) -> None:
    house.open()
    with connected(house) as client:
        client.sendall(line)
        answer = client.recv(65536)
    assert status_of(answer) in (400, 403, 411)
    assert b"aiohttp" not in answer
    assert b"Python" not in answer
