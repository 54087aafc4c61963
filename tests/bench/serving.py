"""What serving costs here: start times, tokens per second and memory by phase, through `applianctl serve` itself.

    python -m tests.bench.serving [--model smollm2|1b] [--repeat 3] [--json FILE]

Run it on a quiet machine: two OpenMP threads on two cores lose a scheduler slice whenever anything else runs. `1b` is a
pseudo-random Llama of 1B shape (speed does not depend on the values). Prints a table; every speed is the median of
`--repeat` runs with the least and the greatest. Memory is the sum of PSS over the worker's processes, sampled twice a
second; `planned` is what `applianctl plan` says for the same phase.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from appliance import jobs
from appliance.settings import Settings
from appliance.supervisor.worker import members

MIB = 1024**2
PHASES = {  # a sentence of `status` -> the phase of the plan it belongs to
    "loading: starting the worker": "load", "loading: kernels checked": "load", "loading: importing the engine": "load",
    "loading: loading weights": "load", "loading: weights loaded": "load",
    "loading: compiling and warming up": "compile", "loading: warmed up": "warm-up",
}
PROMPT = "the cat sat on the mat and looked at the moon while " * 46  # about 512 tokens


class Service:
    """One `applianctl serve` with a memory sampler beside it."""

    def __init__(self, home: Path, model: str, port: int) -> None:
        self.home, self.port = home, port
        self.peaks: dict[str, int] = {}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "appliance.cli.main", "serve", "--model", model, "--port", str(port)],
            env=environment(home), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._sample, daemon=True).start()

    def wait_ready(self) -> float:
        while self.state().get("state") != "ready":
            if self.process.poll() is not None:
                raise SystemExit(f"serve ended: {self.process.stderr and self.process.stderr.read()}")
            time.sleep(0.1)
        return time.monotonic() - self.began

    def state(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads((self.home / "run" / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return status if status.get("agent", {}).get("pid") == self.process.pid else {}

    def _sample(self) -> None:
        while self.process.poll() is None:
            status = self.state()
            if status.get("worker_pid"):
                phase = PHASES.get(status["sentence"], "serve")
                used = sum(pss(process.pid) for process in members(status["worker_pid"]))
                self.peaks[phase] = max(self.peaks.get(phase, 0), used)
            time.sleep(0.5)

    def complete(self, prompt: str, tokens: int) -> float:
        """Seconds for exactly `tokens` tokens."""
        body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=1800) as response:
            assert json.load(response)["usage"]["completion_tokens"] == tokens
        return time.monotonic() - began

    def stop(self) -> float:
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=120)
        return time.monotonic() - began


def pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "APPLIANCE_HOME": str(home), "APPLIANCE_CONFIG": str(home / "appliance.yaml")}


def applianctl(home: Path, *args: str) -> str:
    done = subprocess.run([sys.executable, "-m", "appliance.cli.main", *args], env=environment(home), capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def add_1b(home: Path, python: str) -> None:
    """The random model needs a tokenizer to be served: the default model's, whose vocabulary has the same size."""
    source = home / "source"
    source.mkdir()
    code = f"from pathlib import Path; from tests.bench.quantize_memory import write_model; write_model(Path({str(source)!r}))"
    subprocess.run([python, "-c", code], check=True, cwd=Path(__file__).parents[2])
    applianctl(home, "model", "add", "smollm2")
    stored = home / "store" / "objects" / (home / "store" / "names" / "smollm2").read_text().strip()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(stored / name, source / name)
    applianctl(home, "model", "add", str(source), "--name", "1b")
    shutil.rmtree(source)


def spread(measure: Callable[[int], float], repeat: int) -> dict[str, float]:
    values = [measure(number) for number in range(repeat)]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def speeds(service: Service, repeat: int) -> dict[str, dict[str, float]]:
    service.complete("warm up", 8)

    def decode(number: int) -> float:
        short = service.complete(f"story {number}", 8)
        return 56 / (service.complete(f"story {number}", 64) - short)

    def prefill(number: int) -> float:
        return 512 / service.complete(f"{number} {time.monotonic()} {PROMPT}", 1)

    def streams(count: int) -> Callable[[int], float]:
        def run(number: int) -> float:
            began = time.monotonic()
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(lambda user: service.complete(f"user {user} tells story {number}", 32), range(count)))
            return 32 * count / (time.monotonic() - began)

        return run

    return {"decode tok/s": spread(decode, repeat), "prefill 512 tok/s": spread(prefill, repeat),
            **{f"{n} streams tok/s": spread(streams(n), repeat) for n in (2, 4, 8)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["smollm2", "1b"], default="smollm2")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--port", type=int, default=8177)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        (home / "appliance.yaml").write_text("")
        python = jobs.find_worker_python(Settings())
        if args.model == "1b":
            add_1b(home, python)
        result: dict[str, Any] = {"model": args.model}
        for start in ("cold", "warm"):
            service = Service(home, args.model, args.port)
            try:
                result[f"{start} start s"] = service.wait_ready()
                if start == "warm":
                    result["speeds"] = speeds(service, args.repeat)
            finally:
                result["stop s"] = service.stop()
            result.setdefault("peak MiB", {})[start] = {k: v // MIB for k, v in service.peaks.items()}
        plan = json.loads(applianctl(home, "plan", "--model", args.model, "--json"))
        result["planned MiB"] = {phase: sum(i["bytes"] for i in plan["memory"] if phase in i["phases"]) // MIB
                                 for phase in ("load", "compile", "warm-up", "serve")}
        result["memory"] = [{k: v for k, v in item.items() if k != "phases"} for item in plan["memory"]]
    finally:
        shutil.rmtree(home)
    print(json.dumps(result, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
