"""The fake worker against what was seen of vLLM 0.32: a fake that behaves otherwise would prove nothing."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

FAKE = Path(__file__).with_name("fake_worker.py")


class Worker:
    """One fake worker without an agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "w"

    def start(self, **env: str) -> None:
        (self.folder / "control").mkdir()
        with open(self.folder / "log", "w") as log:
            self.process = self._popen(log, env)
        while self.process.poll() is None:
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.01)
        raise AssertionError((self.folder / "log").read_text())

    def _popen(self, log: IO[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, FAKE, "-m", "appliance.worker", "serve", "--served-model-name", "tiny", "default", "--uds", self.socket,
             "--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "4096", "--shutdown-timeout", "5"],
            env={"PATH": os.environ["PATH"], "FAKE_CONTROL": str(self.folder / "control"), "VLLM_RPC_BASE_PATH": str(self.folder), **env},
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def ask(self, method: str, path: str, body: object = None, timeout: float = 10) -> tuple[int, str]:
        with socket.socket(socket.AF_UNIX) as unix:
            unix.settimeout(timeout)
            unix.connect(str(self.socket))
            connection = http.client.HTTPConnection("worker")
            connection.sock = unix
            connection.request(method, path, json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()

    def complete(self, **body: Any) -> tuple[int, str]:
        return self.ask("POST", "/v1/completions", {"model": "default", "prompt": "a b c", "max_tokens": 5, **body})

    def metrics(self) -> dict[str, float]:
        lines = self.ask("GET", "/metrics")[1].splitlines()
        return {line.split("{")[0].removeprefix("vllm:"): float(line.split()[-1]) for line in lines}

    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with tempfile.TemporaryDirectory(prefix="fake-") as folder:  # short: paths of sockets are limited
        made = Worker(Path(folder))
        yield made
        made.process.kill()
        made.process.wait()


def in_background(worker: Worker, **body: Any) -> tuple[threading.Thread, list[Any]]:
    seen: list[Any] = []

    def ask() -> None:
        try:
            seen.extend(worker.complete(**body))
        except (OSError, http.client.HTTPException) as error:
            seen.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.15)
    return thread, seen


def test_answers_whole_and_streamed(worker: Worker) -> None:
    worker.start()
    whole = json.loads(worker.complete()[1])
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == (" Paris. w0 w1 w2", 5)
    events = worker.complete(stream=True, stream_options={"include_usage": True})[1].split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[-3][6:])["usage"]["total_tokens"] == 8
    assert len(events) == 5 + 3
    chat = worker.ask("POST", "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    assert json.loads(chat[1])["choices"][0]["message"]["content"] == " Paris."
    assert worker.complete(model="nope")[0] == 404
    assert worker.complete(prompt=[1] * 5000)[0] == 400


def test_in_a_long_prompt_only_the_cache_use_moves_and_then_tokens_do(worker: Worker) -> None:
    worker.start(FAKE_PREFILL_S="0.001")
    thread, seen = in_background(worker, prompt=[1] * 1000, max_tokens=20)
    usage = []
    while not worker.metrics()["generation_tokens_total"]:
        usage.append(worker.metrics()["kv_cache_usage_perc"])
        time.sleep(0.1)
    assert len(set(usage)) > 3
    assert usage == sorted(usage)
    thread.join()
    assert seen[0] == 200
    after = worker.metrics()
    assert (after["prompt_tokens_total"], after["generation_tokens_total"], after["num_requests_running"]) == (1000, 20, 0)


def test_a_request_whose_client_goes_is_aborted(worker: Worker) -> None:
    worker.start(FAKE_TOKEN_S="0.02")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(str(worker.socket))
        body = json.dumps({"model": "default", "prompt": "x", "max_tokens": 3000})
        unix.send(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.2)
        assert worker.metrics()["num_requests_running"] == 1
    deadline = time.monotonic() + 5
    while worker.metrics()["num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert worker.metrics()["num_requests_running"] == 0
    assert json.loads(worker.ask("GET", "/load")[1]) == {"server_load": 0}


@pytest.mark.parametrize(("behaviour", "code"), [("die-9", -9), ("die-ill", -4), ("raise", 1), ("oom-log", 1)])
def test_a_dead_engine_is_an_error_to_all_and_exit_status_0(worker: Worker, behaviour: str, code: int) -> None:
    worker.start(FAKE_TOKEN_S="0.01")
    stream, streamed = in_background(worker, max_tokens=3000, stream=True)
    whole, answered = in_background(worker, max_tokens=3000)
    (worker.folder / "control" / behaviour).touch()
    assert worker.process.wait(timeout=10) == 0
    stream.join()
    whole.join()
    assert streamed[0] == 200
    assert "InternalServerError" in streamed[1].split("\n\n")[-3]
    assert answered[0] == 500
    assert "EngineDeadError" in worker.log()
    assert f"Engine process EngineCore ended (exit code: {code})" in worker.log()


def test_the_engine_dies_with_a_killed_api_process(worker: Worker) -> None:
    worker.start()
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    worker.process.kill()
    worker.process.wait()
    deadline = time.monotonic() + 5
    while any(_lives(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert children
    assert not any(_lives(pid) for pid in children)
    assert worker.socket.is_socket()  # a stale one, as the real worker leaves it


def _lives(pid: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_hung_engine_looks_well_to_health(worker: Worker) -> None:
    worker.start()
    (worker.folder / "control" / "hang").touch()
    time.sleep(0.2)
    _, seen = in_background(worker)
    time.sleep(0.5)
    assert seen == []
    assert worker.ask("GET", "/health")[0] == 200
    assert worker.metrics()["num_requests_running"] == 0  # a step must end before a gauge moves
    assert json.loads(worker.ask("GET", "/load")[1]) == {"server_load": 1}
    worker.process.kill()


def test_a_stop_signal_lets_running_requests_finish(worker: Worker) -> None:
    worker.start(FAKE_TOKEN_S="0.01")
    thread, seen = in_background(worker, max_tokens=100)
    worker.process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert worker.complete()[0] == 503
    thread.join()
    assert seen[0] == 200
    assert worker.process.wait(timeout=5) == 0
