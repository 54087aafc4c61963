"""The front door before real vLLM: nothing of the worker without the key, and work that ends when its client leaves."""

from __future__ import annotations

import http.client
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.client import UnixConnection, ask
from tests.served.conftest import Served

pytestmark = pytest.mark.served
ROUTES = json.loads((Path(__file__).parents[1] / "process" / "worker_routes.json").read_text())
ALLOWED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize", "/metrics"}


def answer(served: Served, method: str, path: str, key: str | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, path, body="{}" if method == "POST" else None, headers=headers)
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply.status, data


def running(served: Served) -> float:
    text = ask(served.home / "run" / "agent.sock", "GET", "/metrics").body.decode()
    return sum(float(value) for value in re.findall(r"^vllm:num_requests_running\{[^}]*\} (\S+)$", text, re.MULTILINE))


def test_every_route_of_the_worker_needs_the_key(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    # the worker itself knows these routes: the check below is not about names that exist nowhere
    with_worker = UnixConnection(served.home / "run" / "worker.sock", timeout_s=30)
    with_worker.request("GET", "/version")
    assert with_worker.getresponse().read()
    with_worker.close()
    key = served.applianctl("key", "new").stdout.strip()
    try:
        for method, path in ROUTES:
            status, _ = answer(served, method, path)
            assert status == 401, (method, path)
            status, _ = answer(served, method, path, key)
            assert (status != 404) == (path in ALLOWED), (method, path, status)
            assert status != 401
            with capsys.disabled():
                print(f"  {method:<5}{path:<40}401, with the key {status}")
    finally:
        listed = json.loads(served.applianctl("key", "list", "--json").stdout)["keys"]
        for one in listed:
            served.applianctl("key", "revoke", one["id"])
    assert answer(served, "GET", "/v1/models")[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_engine(served: Served, stream: bool) -> None:
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("POST", "/v1/completions", body=json.dumps(body), headers={"Content-Type": "application/json"})
    deadline = time.monotonic() + 20
    while running(served) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    connection.close()
    left = time.monotonic()
    while running(served) > 0:
        assert time.monotonic() - left < 5
        time.sleep(0.05)


def post(served: Served, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
    connection.request("POST", path, body=json.dumps({"model": "default", **body}), headers={"Content-Type": "application/json"})
    reply = connection.getresponse()
    found: dict[str, Any] = json.loads(reply.read())
    connection.close()
    return reply.status, found


def test_case_007_the_effective_context_is_shown_and_nothing_is_cut_to_fit_it(served: Served) -> None:
    context = int(served.until(lambda status: bool(status["ready"]))["context"])
    _, body = answer(served, "GET", "/v1/models")
    assert f'"max_model_len":{context},'.encode() in body
    assert f"{context} tokens" in served.applianctl("status").stdout
    words = " ".join(["word"] * (context + 8))
    longer: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": [1000] * (context + 1), "max_tokens": 1}),
        ("/v1/completions", {"prompt": [1000] * 16, "max_tokens": context + 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word"}], "max_tokens": context + 1}),
    ]
    for path, wish in longer:
        status, found = post(served, path, **wish)
        assert (status, str(context) in found["error"]["message"]) == (400, True), (path, found)
    assert post(served, "/v1/completions", prompt=[1000] * context, max_tokens=1)[0] == 400  # no room for an answer
    status, found = post(served, "/v1/completions", prompt=[1000] * 1500, max_tokens=2, ignore_eos=True)
    assert (status, found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (200, 1500, 2)
