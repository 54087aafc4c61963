"""The default model served by real vLLM through `applianctl serve`; one server for all tests that can share it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKER = ROOT / ".venv-worker" / "bin" / "python"
RECORDER = Path(__file__).parent / "recorder"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(kw_only=True)
class Served:
    home: Path
    port: int
    process: subprocess.Popen[str]
    lines: list[str]
    seconds: float

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def model(self) -> Path:
        return next((self.home / "store" / "objects").iterdir())

    def applianctl(self, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return run_applianctl(self.home, *args, stdin=stdin)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / "run" / "status.json").read_text())
        return found

    def until(self, true: Callable[[dict[str, Any]], bool], timeout: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while not true(found := self.status()):
            assert time.monotonic() < deadline, found
            assert self.process.poll() is None, found
            time.sleep(0.1)
        return found

    def record(self) -> list[dict[str, int]]:
        path = self.home / "record.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=120)
        return self.process.returncode, rest


def environment(home: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "APPLIANCE_HOME": str(home), "APPLIANCE_WORKER_PYTHON": str(WORKER),
            "APPLIANCE_CONFIG": str(home / "appliance.yaml"), **more}


def run_applianctl(home: Path, *args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "appliance.cli.main", *args], env=environment(home), input=stdin,
                          capture_output=True, text=True, timeout=300, check=False)


def serve(home: Path, *args: str, settings: str = "", timeout: float = 900, scaled: Mapping[str, object] | None = None,
          **env: str) -> Served:
    """Start the service and wait until it says ready; fails with its last words otherwise. `scaled`: times of
    `appliance.recovery` that are minutes on a node."""
    port = free_port()
    home.mkdir(exist_ok=True)
    (home / "appliance.yaml").write_text(settings)
    began = time.monotonic()
    times = "".join(f"recovery.{name} = {value!r}; " for name, value in (scaled or {}).items())
    process = subprocess.Popen(
        [sys.executable, "-c", f"from appliance import recovery; {times}from appliance.cli.main import main; main()", "serve",
         "--port", str(port), *args], env=environment(home, **env),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if "] ready: " in line:
            return Served(home=home, port=port, process=process, lines=lines, seconds=time.monotonic() - began)
        if time.monotonic() - began > timeout:
            break
    process.kill()
    log = home / "state" / "worker.log"
    raise AssertionError("\n".join([*lines, *(log.read_text().splitlines()[-40:] if log.exists() else ())]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A failed test shows what the service said."""
    report: Any = yield
    service = getattr(item, "funcargs", {}).get("served")
    if report.failed and service is not None:
        for log in (service.home / "state" / "agent.log", service.home / "state" / "worker.log"):
            if log.exists():
                report.sections.append((str(log), "\n".join(log.read_text(errors="replace").splitlines()[-60:])))
    return report


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for the session, so that compiled code is shared between the starts."""
    return tmp_path_factory.mktemp("served") / "home"


@pytest.fixture(scope="session")
def served(home: Path) -> Iterator[Served]:
    settings = (f"allow_prompt_logprobs: true\nworker: {{env: {{PYTHONPATH: {RECORDER}, VLLM_PLUGINS: 'cpu_int4,int4_recorder', "
                f"INT4_RECORD: {home / 'record.jsonl'}}}}}\n")
    service = serve(home, settings=settings)
    yield service
    if service.process.poll() is None:
        service.stop()


def reference_logprobs(model: Path, sequences: list[list[int]]) -> list[list[float]]:
    done = subprocess.run([WORKER, str(Path(__file__).with_name("reference.py")), str(model)], input=json.dumps({"sequences": sequences}),
                          capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result["logprobs"]  # type: ignore[no-any-return]
