"""A running agent with a fake worker: real processes, real signals, real sockets, the agent's real front door."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from appliance import client, manifest
from appliance import status as status_file
from appliance.directories import AGENT_SOCKET, sockets
from appliance.errors import NotReachable
from appliance.store import Store
from appliance.supervisor.worker import members
from tests.process.fake_models import int4, write_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
    "quantization_config": {"quant_method": "cpu_int4", "group_size": 32},
}


_ports = itertools.count(20000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]))


def free_port() -> int:
    """A port nobody else takes meanwhile: outside what the kernel gives to clients, apart for each parallel run."""
    for port in _ports:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str
    seconds: float

    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(kw_only=True)
class Agent:
    """`applianctl` in a home of its own; `serve` starts it in the background.

    `fake`: the worker's behaviour from its start on (see fake_worker); `control` changes it while it runs. `settings`
    and `worker_env` go into the configuration file: times are short there, so that tests are.
    """

    home: Path
    python: str
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=lambda: {"drain_s": 1, "probe_s": 1, "memory": {"reserve": "64M"}})
    worker_env: dict[str, str] = field(default_factory=dict)
    scaled: dict[str, object] = field(default_factory=dict)
    """Times of `appliance.recovery` (or `limits.NAME`) made shorter: what waits minutes on a node waits seconds here."""

    @property
    def runtime(self) -> Path:
        return self.home / "run"

    def env(self, fake: str = "ok", **more: str) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": "/", "APPLIANCE_HOME": str(self.home), "APPLIANCE_WORKER_PYTHON": self.python,
                "APPLIANCE_CONFIG": str(self.config(fake)), **more}

    def config(self, fake: str) -> Path:
        path = self.home / f"{fake}.yaml"
        worker = {"env": {"FAKE": fake, "FAKE_CONTROL": str(self.home / "control"), **self.worker_env}}
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({**self.settings, "worker": worker}))
        draft.replace(path)  # a reload may be reading it
        return path

    def control(self, behaviour: str, content: str = "") -> None:
        """Let the running worker, or else the next one, behave so."""
        draft = self.home / "control" / f"{behaviour}.draft"
        draft.write_text(content)
        draft.rename(draft.with_suffix(""))

    def run(self, *args: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "appliance.cli.main", *args], env=self.env(**env), capture_output=True,
                              text=True, timeout=timeout, check=False)

    def serve(self, fake: str = "ok", *args: str, **env: str) -> subprocess.Popen[str]:
        scaled = "".join(f"{name if '.' in name else f'recovery.{name}'} = {value!r}; " for name, value in self.scaled.items())
        process = subprocess.Popen(
            [sys.executable, "-c", f"from appliance import recovery; from appliance.supervisor import limits; {scaled}from appliance.cli.main import main; main()", "serve", "--port", str(self.port), "--model", "tiny", *args],
            env=self.env(fake, **env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        self.processes.append(process)
        return process

    def status(self) -> dict[str, object]:
        try:
            return status_file.read(self.runtime)
        except NotReachable:
            return {"state": "absent"}

    def wait_for(self, *states: str, timeout: float = 60) -> dict[str, object]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            current = self.status()
            if current["state"] in states:
                return current
            time.sleep(0.05)
        raise AssertionError(f"not {states} within {timeout} s: {self.status()}")

    def ready(self, timeout: float = 60) -> dict[str, Any]:
        """Wait until it says that it answers now; the status of that moment."""
        return self.until(lambda status: bool(status.get("ready")), timeout=timeout)

    def until(self, true: Callable[[dict[str, Any]], bool], timeout: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            current: dict[str, Any] = self.status()
            if true(current):
                return current
            if all(process.poll() is not None for process in self.processes):
                raise AssertionError(f"the agent has ended: {[process.communicate() for process in self.processes]}")
            time.sleep(0.02)
        raise AssertionError(f"not within {timeout} s: {self.status()}")

    def get(self, path: str, *, timeout: float = 10) -> Reply:
        return self.ask("GET", path, timeout=timeout)

    def complete(self, *, timeout: float = 30, **body: Any) -> Reply:
        return self.ask("POST", "/v1/completions", {"model": "default", "prompt": "The capital of France is", "max_tokens": 4, **body},
                        timeout=timeout)

    def ask(self, method: str, path: str, body: object = None, *, timeout: float = 30) -> Reply:
        """One request on the public port, the answer read whole."""
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
            return Reply(status=response.status, headers=dict(response.headers), text=text, seconds=time.monotonic() - began)
        finally:
            connection.close()

    def command(self, name: str) -> None:
        """A command on the agent's own socket, as `applianctl` sends it."""
        answer = client.ask(sockets(self.runtime) / AGENT_SOCKET, "POST", f"/control/{name}")
        assert answer.status == 202, answer

    def worker(self) -> list[psutil.Process]:
        """The processes of the worker that the status names: API process first, then the engine."""
        leader = self.status().get("worker_pid")
        return sorted(members(int(str(leader))), key=lambda process: process.pid) if leader else []

    def sockets(self) -> list[str]:
        return sorted(path.name for path in sockets(self.runtime).iterdir() if path.is_socket())

    def log(self) -> str:
        return (self.home / "state" / "worker.log").read_text()

    def last_written(self) -> dict[str, object]:
        written: dict[str, object] = json.loads((self.runtime / "status.json").read_text())
        return written

    def worker_processes(self) -> list[psutil.Process]:
        """The fake worker and its children: whatever works in a folder of this home."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                agent = process.pid in [p.pid for p in self.processes]
                here = process.cwd().startswith(str(self.home))
                if here and not agent and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    home = tmp_path / "h"
    for folder in (home, home / "run", home / "state", home / "control"):
        folder.mkdir()
    script = home / "fake-python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_worker.py")} "$@"\n')
    script.chmod(0o755)
    made = Agent(home=home, python=str(script))
    shapes = {
        **int4("model.embed_tokens", 256, 64, 32), **int4("model.layers.0.self_attn.q_proj", 64, 64, 32),
        **int4("model.layers.0.mlp.down_proj", 64, 64, 32), "model.norm.weight": ("BF16", (64,)),
    }
    store = Store(home / "store")
    with store.begin(manifest.key("1" * 64, {})) as draft:
        write_model(draft.folder, CONFIG, shapes)
        store.commit(draft, source="tiny", source_digest="1" * 64, recipe={}, report={}, created="2026-01-01T00:00:00", name="tiny")
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()
    for left in made.worker_processes():
        left.kill()
