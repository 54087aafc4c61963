"""The servers under measurement, ours and the peer, behind one interface: start, ready, memory, stop.

Ready means the same for both: an answer of two tokens came. Memory is the sum of PSS over all processes of the server.
Both are started with the same threads, the same number of running requests and the same context for each. The peer
sets aside its key/value cache for all of them (a shared cache of our size makes it 6 % slower), ours what the plan says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from appliance.supervisor.worker import members
from tests.bench import build_llama, client
from tests.bench.kernels import ISA_ENV

RUNNING = 8
CONTEXT_TOKENS = 2048
KV_TOKENS = RUNNING * CONTEXT_TOKENS
"""The peer's key/value cache."""
PHASES = {  # a sentence of `status` -> the phase of the plan it belongs to
    "loading: starting the worker": "load", "loading: kernels checked": "load", "loading: importing the engine": "load",
    "loading: loading weights": "load", "loading: weights loaded": "load",
    "loading: compiling and warming up": "compile", "loading: warmed up": "warm-up",
}


class Server(Protocol):
    """A running server."""

    port: int
    process: subprocess.Popen[str]

    def pids(self) -> list[int]:
        """All of its processes."""
        ...

    def wait_ready(self) -> float:
        """Seconds from its start to the first answer."""
        ...


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Sums over a server's processes. `anonymous`: private memory without a file behind it."""

    pss_bytes: int
    anonymous_bytes: int
    file_bytes: int
    processes: int

    def to_dict(self) -> dict[str, Any]:
        return {"pss MiB": self.pss_bytes >> 20, "anonymous MiB": self.anonymous_bytes >> 20,
                "file MiB": self.file_bytes >> 20, "processes": self.processes}


class Ours:
    """`applianctl serve`, with a memory sampler beside it until it is ready."""

    def __init__(self, home: Path, model: str, port: int) -> None:
        self.home, self.port = home, port
        self.peaks: dict[str, int] = {}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "appliance.cli.main", "serve", "--model", model, "--port", str(port)],
            env=environment(home), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._sample, daemon=True).start()

    def wait_ready(self) -> float:
        while self._state().get("state") != "ready":
            if self.process.poll() is not None:
                raise SystemExit(f"serve ended: {self.process.stderr and self.process.stderr.read()}")
            time.sleep(0.05)
        return time.monotonic() - self.began

    def pids(self) -> list[int]:
        """The agent and the worker's session."""
        worker = self._state().get("worker_pid")
        return [self.process.pid, *((process.pid for process in members(worker)) if worker else ())]

    def _state(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads((self.home / "run" / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status if status.get("agent", {}).get("pid") == self.process.pid else {}

    def _sample(self) -> None:
        while self.process.poll() is None:
            status = self._state()
            if status.get("state") == "ready":
                return  # reading PSS walks all pages of a process, which would disturb what is timed
            if status.get("worker_pid"):
                phase = PHASES.get(status["sentence"], "serve")
                used = memory([process.pid for process in members(status["worker_pid"])]).pss_bytes
                self.peaks[phase] = max(self.peaks.get(phase, 0), used)
            time.sleep(0.5)


class Llama:
    """llama-server of one build with one file."""

    def __init__(self, file: Path, isa: str, threads: int, port: int, log: Path) -> None:
        self.port = port
        self.began = time.monotonic()
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [str(build_llama.binary("llama-server", isa)), "-m", str(file), "--host", "127.0.0.1", "--port", str(port),
                 "-t", str(threads), "-tb", str(threads), "--parallel", str(RUNNING), "-c", str(KV_TOKENS), "--no-kv-unified",
                 "-ctk", "f16", "-ctv", "f16", "--fit", "off", "--cache-ram", "0"],
                stdout=out, stderr=subprocess.STDOUT, text=True)

    def wait_ready(self) -> float:
        while not _healthy(self.port):
            if self.process.poll() is not None:
                raise SystemExit("llama-server ended; see its log")
            time.sleep(0.05)
        client.complete(self.port, client.prompt(4, 1), 2)
        return time.monotonic() - self.began

    def pids(self) -> list[int]:
        return [self.process.pid]


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def stop(server: Server) -> float:
    """SIGTERM, and the seconds until the server has ended."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(timeout=120)
    return time.monotonic() - began


def memory(pids: list[int]) -> Memory:
    """Of these processes together; one that is gone counts as nothing."""
    sums = {"Pss": 0, "Pss_Anon": 0, "Pss_File": 0}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name in sums:
                sums[name] += int(value.split()[0]) * 1024
    return Memory(pss_bytes=sums["Pss"], anonymous_bytes=sums["Pss_Anon"], file_bytes=sums["Pss_File"], processes=len(pids))


def evict(file: Path) -> None:
    """Drop a file from the page cache: the next start reads it from disk. Pages that a process maps stay."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "APPLIANCE_HOME": str(home), "APPLIANCE_CONFIG": str(home / "appliance.yaml")}


def write_config(home: Path, isa: str, threads: int, extra: dict[str, Any]) -> None:
    """The appliance's configuration file (JSON is YAML)."""
    config: dict[str, Any] = {"context": CONTEXT_TOKENS, "max_running": RUNNING, "cpu": {"threads": threads}, **extra}
    if ISA_ENV[isa]:
        config["worker"] = {"env": ISA_ENV[isa]}
    (home / "appliance.yaml").write_text(json.dumps(config, indent=1))


def applianctl(home: Path, *args: str) -> str:
    """One command of ours. Raises SystemExit with its error."""
    done = subprocess.run([sys.executable, "-m", "appliance.cli.main", *args], env=environment(home), capture_output=True,
                          text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout
