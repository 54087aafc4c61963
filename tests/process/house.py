"""A front door without an agent: real sockets and event loop, a Board that the test writes, the fake worker behind it."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance.board import Board, Gate
from appliance.client import UnixConnection
from appliance.front.door import FrontDoor
from appliance.keys import KeyRing
from appliance.settings import Settings
from tests.process.conftest import free_port

STATUS = {"state": "ready", "ready": True, "sentence": "ready: it answered", "max_running": 4, "max_queued": 16}
OPEN = Gate(open=True, reason="", retry_after_s=1)
COMPLETION = {"prompt": "The capital of France is", "max_tokens": 4}


@dataclass(kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json()["error"]["code"])


@dataclass(kw_only=True)
class House:
    """A folder with a front door and, once `work` is called, a fake worker."""

    home: Path
    board: Board = field(default_factory=Board)
    port: int = field(default_factory=free_port)
    door: FrontDoor | None = None
    worker: subprocess.Popen[bytes] | None = None

    @property
    def control(self) -> Path:
        return self.home / "control"

    @property
    def keys(self) -> KeyRing:
        return KeyRing(self.home / "keys.json")

    def open(self, settings: Settings | None = None, *, gate: Gate = OPEN, **status: Any) -> FrontDoor:
        settings = settings or Settings()
        self.board.publish(STATUS | status)
        self.board.gate = gate
        self.door = FrontDoor(
            settings=replace(settings, listen=replace(settings.listen, port=self.port)), board=self.board,
            worker_socket=self.home / "worker.sock", agent_socket=self.home / "agent.sock", keys=self.keys)
        self.door.start()
        return self.door

    def work(self, **env: str) -> None:
        self.control.mkdir(exist_ok=True)
        (self.home / "worker.sock").unlink(missing_ok=True)
        self.worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fake_worker.py")), "-m", "appliance.worker", "serve",
             "--served-model-name", "tiny", "default", "--uds", str(self.home / "worker.sock"), "--max-num-seqs", "5",
             "--max-model-len", "4096", "--max-num-batched-tokens", "512", "--shutdown-timeout", "1"],
            env={"PATH": "/usr/bin:/bin", "FAKE_CONTROL": str(self.control), "VLLM_RPC_BASE_PATH": str(self.home), **env},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.home)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), contextlib.closing(UnixConnection(self.home / "worker.sock", timeout_s=5)) as one:
                one.request("GET", "/health")
                if one.getresponse().status == 200:
                    return
            time.sleep(0.02)
        raise AssertionError("the fake worker did not start")

    def metric(self, name: str) -> float:
        """A figure of the worker itself."""
        with contextlib.closing(UnixConnection(self.home / "worker.sock", timeout_s=5)) as one:
            one.request("GET", "/metrics")
            text = one.getresponse().read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def ask(self, method: str, path: str, body: Any = None, *, own: bool = False, timeout: float = 20, **headers: str) -> Answer:
        connection = UnixConnection(self.home / "agent.sock", timeout_s=timeout) if own else \
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        began = time.monotonic()
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            kind = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, path, body=data, headers=kind | {k.replace("_", "-"): v for k, v in headers.items()})
            reply = connection.getresponse()
            return Answer(status=reply.status, headers=dict(reply.headers), body=reply.read(), seconds=time.monotonic() - began)

    def complete(self, **changes: Any) -> Answer:
        return self.ask("POST", "/v1/completions", COMPLETION | changes)

    def until(self, true: Any, timeout: float = 10) -> None:
        deadline = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < deadline, self.board.traffic
            time.sleep(0.02)


@contextlib.contextmanager
def built() -> Iterator[House]:
    """An empty house; what was opened and started in it ends with it."""
    # pytest's own folders have names too long for a socket.
    made = House(home=Path(tempfile.mkdtemp(prefix="door-")))
    try:
        yield made
    finally:
        if made.door:
            made.door.stop(grace_s=0)
        if made.worker:
            made.worker.kill()
            made.worker.wait()
        shutil.rmtree(made.home)
