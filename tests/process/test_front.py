"""The front door: who comes in, what reaches the worker, what is said when it cannot."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.board import Command, Gate
from appliance.errors import ConfigError, TransientError
from appliance.settings import Listen, Settings
from appliance.supervisor.health import listening_socket
from tests.process.house import COMPLETION, OPEN, House, built

ALLOWED = (
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"), ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"), ("POST", "/tokenize"), ("POST", "/detokenize"),
)
WORKERS = json.loads(Path(__file__).with_name("worker_routes.json").read_text())
"""Every route of vLLM's app as the worker runs it; tests/kernels checks that none is missing."""
CLOSED = [(method, path.replace("{response_id}", "resp_1")) for method, path in WORKERS
          if (method, path) not in ALLOWED and path not in ("/metrics", "/status")]
SPELLINGS = ("/v1/completions/", "//v1/completions", "/V1/completions", "/v1/completions/..", "/v1/../invocations", "/v1",
             "/invocations?x=/v1/completions", "/v1/models/", "/v1/completions/render", "/control/stop", "/", "/v1/completions%00")


@pytest.fixture
def house() -> Iterator[House]:
    with built() as made:
        yield made


def test_a_completion_comes_through(house: House) -> None:
    house.work()
    house.open()
    answer = house.complete()
    assert answer.status == 200, answer.body
    assert answer.json()["usage"]["completion_tokens"] == 4
    stream = house.complete(stream=True)
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    assert stream.headers["X-Accel-Buffering"] == "no"
    assert stream.headers["Server"] == "appliance"
    assert stream.body.endswith(b"data: [DONE]\n\n")
    assert stream.body.count(b"data: {") == 4
    house.until(lambda: house.board.traffic.answered_total == 2)
    traffic = house.board.traffic
    assert (traffic.accepted_total, traffic.failed_total, traffic.refused_total, traffic.running) == (2, 0, 0, 0)
    assert traffic.chunks_total == 4


def test_pieces_of_a_stream_arrive_as_they_are_made(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.2")
    house.open()
    with socket.create_connection(("127.0.0.1", house.port), timeout=10) as client:
        body = json.dumps(COMPLETION | {"stream": True, "max_tokens": 5}).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        arrivals, data = [], b""
        while not data.endswith(b"0\r\n\r\n"):
            piece = client.recv(65536)
            assert piece
            arrivals += [time.monotonic()] * piece.count(b"data: {")
            data += piece
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert len(gaps) == 4
    assert min(gaps) > 0.1  # nothing waited for the next one


@pytest.mark.parametrize(("method", "path"), [*ALLOWED, *CLOSED, *(("POST", path) for path in SPELLINGS), ("GET", "/status"),
                                              ("GET", "/metrics"), ("DELETE", "/v1/models/tiny"), ("OPTIONS", "/v1/completions")])
def test_every_path_without_the_key_is_401(house: House, method: str, path: str) -> None:
    house.keys.new("")
    house.open()
    answer = house.ask(method, path, {} if method == "POST" else None)
    assert answer.status == 401
    assert answer.code == "invalid_api_key"
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.headers["Server"] == "appliance"


def test_what_is_not_on_the_list_never_reaches_the_worker(house: House) -> None:
    _, key = house.keys.new("")
    house.work()
    house.open()
    for method, path in [*CLOSED, *(("POST", path) for path in SPELLINGS)]:
        answer = house.ask(method, path, COMPLETION if method == "POST" else None, Authorization=f"Bearer {key}")
        assert answer.status in (404, 405), (method, path, answer.status)
        assert answer.json()["error"]["message"]
    assert house.metric("vllm:request_success_total") == 0
    for method, path in ALLOWED:
        body = {"model": "tiny", "messages": []} | COMPLETION if method == "POST" else None
        answer = house.ask(method, path, body, Authorization=f"Bearer {key}")
        assert answer.status == 200, (method, path, answer.body)


@pytest.mark.parametrize(("header", "status"), [
    ("Bearer {}", 200), ("bearer {}", 200), ("Bearer  {} ", 200), ("{}", 401), ("Basic {}", 401), ("Bearer", 401), ("Bearer ", 401),
    ("Bearer {}x", 401), ("Bearer x{}", 401), ("Bearer {0},{0}", 401), ("Bearer \xe9", 401),
])
def test_the_authorization_header(house: House, header: str, status: int) -> None:
    _, key = house.keys.new("")
    house.work()
    house.open()
    assert house.ask("GET", "/v1/models", Authorization=header.format(key)).status == status
    assert house.ask("GET", f"/v1/models?key={key}").status == 401


def test_keys_come_and_go_while_the_door_is_open(house: House) -> None:
    house.work()
    house.open()
    assert house.ask("GET", "/v1/models").status == 200
    key_id, key = house.keys.new("")
    assert house.ask("GET", "/v1/models").status == 401
    assert house.ask("GET", "/v1/models", Authorization=f"Bearer {key}").status == 200
    house.keys.revoke(key_id)
    assert house.ask("GET", "/v1/models", Authorization=f"Bearer {key}").status == 200  # no keys: open again


@pytest.mark.parametrize(("headers", "status"), [
    ({"Host": "localhost:8000"}, 200), ({"Host": "127.0.0.1"}, 200), ({"Host": "[::1]:1"}, 200), ({"Host": "127.9.9.9"}, 200),
    ({"Host": "rebound.example:8000"}, 403), ({"Host": "127.0.0.1.example"}, 403), ({"Host": "10.0.0.1"}, 403), ({"Host": ""}, 403),
    ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200), ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
    ({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Origin": "http://localhost.evil.example"}, 403),
])
def test_without_a_key_browsers_pages_are_kept_out(house: House, headers: dict[str, str], status: int) -> None:
    house.work()
    house.open()
    assert house.ask("GET", "/v1/models", **headers).status == status


def test_with_a_key_host_and_origin_do_not_matter(house: House) -> None:
    _, key = house.keys.new("")
    house.work()
    house.open()
    answer = house.ask("GET", "/v1/models", Authorization=f"Bearer {key}", Host="node.lan", Origin="https://chat.lan")
    assert answer.status == 200
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_status_and_metrics_are_for_the_own_socket_or_a_key(house: House) -> None:
    house.work()
    house.open()
    assert house.complete().status == 200
    assert house.ask("GET", "/status").code == "key_needed"
    assert house.ask("GET", "/metrics").code == "key_needed"
    assert house.ask("GET", "/status", own=True).json()["sentence"] == "ready: it answered"
    house.until(lambda: house.board.traffic.answered_total == 1)
    metrics = house.ask("GET", "/metrics", own=True).body.decode()
    assert "appliance_ready 1" in metrics
    assert "appliance_requests_answered_total 1" in metrics
    assert "vllm:num_requests_running" in metrics
    _, key = house.keys.new("")
    for path in ("/status", "/metrics"):
        assert house.ask("GET", path, Authorization=f"Bearer {key}").status == 200
        assert house.ask("GET", path, own=True).status == 200
    house.board.gate = Gate(open=False, reason="loading")
    assert "vllm:" not in house.ask("GET", "/metrics", own=True).body.decode()


def test_a_deaf_worker_does_not_hold_up_the_metrics(house: House) -> None:
    house.work()
    house.open()
    (house.control / "deaf").touch()
    time.sleep(0.2)
    answer = house.ask("GET", "/metrics", own=True)
    assert answer.status == 200
    assert answer.seconds < 2
    assert "vllm:" not in answer.body.decode()


@pytest.mark.parametrize(("gate", "status", "word", "code"), [
    (OPEN, {}, "ready", 200),
    (Gate(open=False, reason="loading", retry_after_s=7), {"state": "loading", "ready": False}, "loading", 503),
    (Gate(open=False, reason="draining"), {"state": "draining", "ready": False}, "draining", 503),
    (OPEN, {"state": "waiting", "ready": False}, "waiting", 503),
])
def test_case_076_ready_and_its_words(house: House, gate: Gate, status: dict[str, Any], word: str, code: int) -> None:
    house.keys.new("")
    house.open(gate=gate, **status)
    for method, own in (("GET", False), ("GET", True), ("HEAD", False)):
        ready = house.ask(method, "/readyz", own=own)
        assert ready.status == code
        assert ready.body == (b"" if method == "HEAD" else word.encode() + b"\n")
        assert ("Retry-After" in ready.headers) == (code == 503)
        assert house.ask(method, "/livez", own=own).status == 200


def test_case_076_a_stuck_loop_is_neither_live_nor_ready(house: House) -> None:
    house.open()
    house.board._turned_at -= 11
    assert house.ask("GET", "/livez").body == b"stuck\n"
    for path in ("/livez", "/readyz"):
        assert house.ask("GET", path).status == 503
    house.board.publish(house.board.status)
    assert house.ask("GET", "/livez").status == 200


def test_a_shut_gate_says_why_and_when_to_come_back(house: House) -> None:
    house.open(gate=Gate(open=False, reason="loading", retry_after_s=7), sentence="loading: weights, 40 %")
    for own in (False, True):
        answer = house.ask("POST", "/v1/chat/completions", {"messages": []}, own=own)
        assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "loading", "7")
        assert "weights, 40 %" in answer.json()["error"]["message"]
    house.until(lambda: house.board.traffic.refused_total == 2)


def test_commands_come_in_on_the_own_socket_only(house: House) -> None:
    house.open()
    for name, body in (("drain", None), ("reload", {"a body": "is not read"})):
        assert house.ask("POST", f"/control/{name}", body, own=True).status == 202
        assert house.board.commands.get_nowait() == Command(name=name)
    assert house.ask("POST", "/control/explode", own=True).status == 404
    assert house.ask("GET", "/control/stop", own=True).status == 405
    assert house.ask("POST", "/control/stop", {}).status == 404
    assert house.board.commands.empty()


def test_one_model_by_its_name(house: House) -> None:
    house.work()
    house.open()
    assert [model["id"] for model in house.ask("GET", "/v1/models").json()["data"]] == ["tiny", "default"]
    assert house.ask("GET", "/v1/models/default").json()["id"] == "default"
    assert house.ask("GET", "/v1/models/nothing").code == "model_not_found"


def test_the_workers_refusals_come_through(house: House) -> None:
    house.work()
    house.open()
    assert house.complete(model="nothing").status == 404
    assert house.complete(max_tokens=100_000).status == 400
    (house.control / "error").touch()
    house.until(lambda: house.complete().status == 500)
    house.until(lambda: house.board.traffic.failed_total >= 1)


def test_no_worker_is_503_and_come_back(house: House) -> None:
    house.open()
    answer = house.complete()
    assert (answer.status, answer.code) == (503, "worker_restarting")
    assert answer.headers["Retry-After"]


@pytest.mark.parametrize("death", ["api-9", "close-mid-stream"])
def test_a_worker_that_dies_in_the_middle_ends_the_stream_with_an_error_event(house: House, death: str) -> None:
    house.work(FAKE_TOKEN_S="0.05")
    house.open()
    if death == "close-mid-stream":
        (house.control / death).touch()
        time.sleep(0.2)
    else:
        threading.Timer(0.7, (house.control / death).touch).start()
    answer = house.complete(stream=True, max_tokens=50)
    events = [json.loads(line[6:]) for line in answer.body.split(b"\n") if line.startswith(b"data: {")]
    assert len(events) >= 2
    assert "choices" in events[0]
    assert events[-1]["error"]["code"] == "worker_lost"
    assert b"[DONE]" not in answer.body
    house.until(lambda: house.board.traffic.failed_total == 1)


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_dies_in_the_middle_is_no_answer(house: House, stream: bool) -> None:
    """vLLM's API process ends such a stream by itself, with status 200, an error event and `[DONE]`."""
    house.work(FAKE_TOKEN_S="0.05")
    house.open()
    threading.Timer(0.7, (house.control / "die-9").touch).start()
    answer = house.complete(stream=stream, max_tokens=200)
    assert answer.status == (200 if stream else 500)
    assert (b'data: {"error"' in answer.body) == stream
    house.until(lambda: house.board.traffic.failed_total == 1)
    assert house.board.traffic.answered_total == 0


@pytest.mark.parametrize("cuts", [(), (1,), (15,), (5, 9)])
@pytest.mark.parametrize(("event", "failed"), [
    (b'data: {"error": {"message": "x"}}\n\n', 1), (b'data: {"error":{"message":"x"}}\n\n', 1),
    (b'data: {"choices":[{"text":"data: {\\"error\\""}]}\n\n', 0),
])
def test_an_error_event_is_seen_however_it_is_cut(house: House, cuts: tuple[int, ...], event: bytes, failed: int) -> None:
    edges = (0, *cuts, len(event))
    with answering_once(house, FIRST, *(event[start:end] for start, end in itertools.pairwise(edges))):
        assert house.complete(stream=True).body == FIRST + event
    house.until(lambda: house.board.traffic.answered_total + house.board.traffic.failed_total == 1)
    assert house.board.traffic.failed_total == failed


@pytest.mark.parametrize(("pieces", "status", "code", "message"), [
    ((None,), 502, "worker_lost", "the worker ended before its answer was complete; it is being restarted"),
    ((b'data: {"error": {"message": "no engine", "code": 500}}\n\n', b"data: [DONE]\n\n"), 500, "worker_failed", "no engine"),
    ((b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n',), 400, "worker_failed", "too long"),
    ((b'data: {"error": "?"}\n\n',), 500, "worker_failed", "the worker failed"),
])
def test_a_stream_that_has_not_begun_fails_with_a_status(
    house: House, pieces: tuple[bytes | None, ...], status: int, code: str, message: str
) -> None:
    """Then a gateway may ask another node. vLLM sends the headers of a stream before it has a token."""
    with answering_once(house, *pieces):
        answer = house.complete(stream=True)
    assert (answer.status, answer.code, answer.json()["error"]["message"]) == (status, code, message)


FIRST = b'data: {"choices": []}\n\n'


@contextlib.contextmanager
def answering_once(house: House, *pieces: bytes | None) -> Iterator[None]:
    """A worker that answers one request with a stream of these pieces; None closes the connection before its end."""
    with socket.socket(socket.AF_UNIX) as worker:
        worker.bind(str(house.home / "worker.sock"))
        worker.listen()

        def answer() -> None:
            connection, _ = worker.accept()
            with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the door need not read to the end
                while b"prompt" not in connection.recv(65536):
                    pass
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                for piece in pieces:
                    time.sleep(0.05)
                    if piece is None:
                        return
                    connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
                connection.sendall(b"0\r\n\r\n")

        threading.Thread(target=answer).start()
        house.open()
        yield


def test_a_worker_that_dies_before_its_answer_is_an_error_answer(house: House) -> None:
    house.work(FAKE_TOKEN_S="0.1")
    house.open()
    threading.Timer(0.5, (house.control / "api-9").touch).start()
    answer = house.complete(max_tokens=100)
    assert (answer.status, answer.code) == (502, "worker_lost")


def test_another_worker_on_the_same_socket_is_found(house: House) -> None:
    house.work()
    house.open()
    assert house.complete().status == 200
    assert house.worker is not None
    house.worker.kill()
    house.worker.wait()
    assert house.complete().status == 503
    house.work()
    assert house.complete().status == 200


def test_case_012_a_taken_port_is_refused_by_name(house: House) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", house.port))
        holder.listen()
        with pytest.raises(TransientError, match=f"cannot listen on 127.0.0.1:{house.port}: port {house.port} is taken by"):
            house.open()
        assert not (house.home / "agent.sock").exists()


def test_the_port_is_taken_from_the_moment_it_is_bound(house: House) -> None:
    with listening_socket("127.0.0.1", house.port, backlog=1), pytest.raises(TransientError, match="is taken"):
        listening_socket("127.0.0.1", house.port, backlog=1)


def test_an_address_of_another_machine_is_a_wrong_setting(house: House) -> None:
    house.keys.new("")
    with pytest.raises(ConfigError, match="address of this machine"):
        house.open(Settings(listen=Listen(host="192.0.2.1")))


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "http://127.0.0.1"), ("localhost", "http://localhost"), ("::1", "http://[::1]")])
def test_the_address_as_bound(house: House, host: str, shown: str) -> None:
    try:
        door = house.open(Settings(listen=Listen(host=host)))
    except ConfigError:
        pytest.skip("no IPv6 here")
    assert door.address == f"{shown}:{house.port}"
    with contextlib.closing(http.client.HTTPConnection(host, house.port, timeout=5)) as client:
        client.request("GET", "/livez")
        assert client.getresponse().read() == b"live\n"


LOGPROBS = COMPLETION | {"logprobs": 1}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("body", [
    COMPLETION | {"prompt_logprobs": 0}, COMPLETION | {"prompt_logprobs": 5, "stream": True}, LOGPROBS | {"echo": True},
    LOGPROBS | {"echo": "yes", "logprobs": 0}, CHAT | {"prompt_logprobs": 1}, CHAT | {"echo": True},
    CHAT | {"echo": True, "logprobs": True, "top_logprobs": 2}, json.dumps(COMPLETION | {"prompt_logprobs": 0}).encode("utf-16"),
    json.dumps(COMPLETION | {"prompt_logprobs": 0}).encode("utf-32-le"), b'\xef\xbb\xbf{"prompt":"x","prompt_logprobs":1}',
    rb'{"prompt":"x","\u0070rompt_logprobs":1}', rb'{"prompt":"x","prompt\u005Flogprobs":1}', rb'{"prompt":"x","logprobs":1,"ech\u006f":1}',
    b'{"prompt":"x","prompt_logprobs":null,"prompt_logprobs":1}', b'{"x":' + b"[" * 100_000 + b'"prompt_logprobs"', b'{"echo"',
    {"prompt": "x" * 1_100_000, "prompt_logprobs": 0}, {"prompt": "x" * 1_100_000, "echo": True},  # not looked at closely
])
def test_what_takes_memory_outside_the_plan_is_refused_unless_allowed(house: House, body: Any) -> None:
    house.work()
    door = house.open()
    path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
    for own in (False, True):
        answer = house.ask("POST", path, body, own=own)
        assert (answer.status, answer.code) == (400, "not_allowed")
    assert house.metric("vllm:prompt_tokens_total") == 0
    assert door.reload(Settings(listen=Listen(port=house.port), allow_prompt_logprobs=True)) is None
    again = house.ask("POST", path, body)
    assert again.status == 200 or again.code != "not_allowed"


@pytest.mark.parametrize("body", [
    COMPLETION | {"prompt_logprobs": None}, COMPLETION | {"echo": True}, LOGPROBS, LOGPROBS | {"echo": False},
    COMPLETION | {"prompt": 'say "echo" and "prompt_logprobs": 1', "logprobs": 1}, COMPLETION | {"prompt": "echo", "logprobs": 1},
    COMPLETION | {"prompt": "caf\u00e9", "logprobs": 1}, CHAT | {"logprobs": True, "top_logprobs": 2},
    CHAT | {"echo": True, "top_logprobs": None}, CHAT | {"tools": [{"parameters": {"prompt_logprobs": 1, "echo": True}}]},
])
def test_what_only_looks_like_it_comes_through(house: House, body: Any) -> None:
    house.work()
    house.open()
    assert house.ask("POST", "/v1/chat/completions" if "messages" in body else "/v1/completions", body).status == 200


@pytest.mark.parametrize("body", [b"[1]", b'"echo"', b"{", b"\xff"])
def test_what_is_no_request_is_the_workers_to_refuse(house: House, body: bytes) -> None:
    house.work()
    house.open()
    answer = house.ask("POST", "/v1/completions", body)
    assert answer.status == 400
    assert answer.code != "not_allowed"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "node.example"])
def test_other_machines_are_not_served_without_a_key(house: House, host: str) -> None:
    with pytest.raises(ConfigError, match="applianctl key new"):
        house.open(Settings(listen=Listen(host=host)))


def test_on_every_address_only_the_key_opens_and_losing_all_keys_closes(house: House) -> None:
    key_id, key = house.keys.new("")
    house.work()
    house.open(Settings(listen=Listen(host="0.0.0.0")))
    assert house.ask("GET", "/v1/models").status == 401
    assert house.ask("GET", "/v1/models", Authorization=f"Bearer {key}").status == 200
    house.keys.revoke(key_id)
    assert house.ask("GET", "/v1/models", Authorization=f"Bearer {key}").status == 401
    assert house.ask("GET", "/v1/models").status == 401


def test_the_own_socket_is_for_user_and_group_and_replaces_a_leftover(house: House) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(house.home / "agent.sock"))
    house.open()
    assert stat.S_IMODE((house.home / "agent.sock").stat().st_mode) == 0o660
    assert house.ask("GET", "/livez", own=True).status == 200


def test_case_062_the_worker_sees_neither_key_nor_query_nor_foreign_headers(house: House) -> None:
    _, key = house.keys.new("")
    seen: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as worker:
        worker.bind(str(house.home / "worker.sock"))
        worker.listen()

        def answer_once() -> None:
            connection, _ = worker.accept()
            with connection:
                while b"the-body" not in b"".join(seen):
                    seen.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\nX-Inside: 1\r\n"
                                   b"Set-Cookie: a=b\r\n\r\n{}")

        threading.Thread(target=answer_once).start()
        house.open()
        answer = house.ask("POST", f"/v1/completions?api_key={key}", b'"the-body"', Authorization=f"Bearer {key}",
                           Cookie=f"key={key}", X_Request_Id="abc", X_Forwarded_For="1.2.3.4", Accept="application/json")
    assert answer.status == 200
    assert {"X-Inside", "Set-Cookie"}.isdisjoint(answer.headers)
    head, _, body = b"".join(seen).partition(b"\r\n\r\n")
    assert body == b'"the-body"'
    assert key.encode() not in head
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/completions HTTP/1.1"
    names = {line.partition(":")[0].lower() for line in lines[1:]}
    assert names <= {"host", "content-type", "accept", "x-request-id", "content-length", "accept-encoding", "user-agent"}
    assert "x-request-id: abc" in head.decode().lower()


@pytest.mark.parametrize("sent", [
    b"\x00" * 1000, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\n\r\n", b"CONNECT example:443 HTTP/1.1\r\nHost: example\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /livez HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", b"GET /" + b"a" * 100_000,
    b"GET /%ff%00%2e%2e/ HTTP/1.1\r\nHost: localhost\r\n\r\n", "GET /v1/modèles HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
    b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200,
])
def test_garbage_is_survived(house: House, sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    house.open()
    with socket.create_connection(("127.0.0.1", house.port), timeout=5) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        answer = client.recv(65536)
    assert not answer or answer.startswith(b"HTTP/1.")
    assert b"500" not in answer[:20]
    assert house.ask("GET", "/livez").status == 200
    assert "Traceback" not in capfd.readouterr().err
