"""A long mixed load on a running service, and whether anything grows: `python -m tests.bench.soak --port 8000`.

Clients ask short and long, whole and streamed, go away in the middle, and send rubbish; every request has an outcome that
is right for its kind, and anything else counts as unexpected. Every ten seconds agent and worker are measured from
outside: memory (PSS, RSS), descriptors, threads, /dev/shm, restarts. Growth is the slope of a straight line through the
samples after the service has settled, per hour. Exit code 1 when a limit of `LIMITS` is passed, a worker was restarted or
an outcome was unexpected. Start the service first; the load is the same for the same seed.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from appliance.supervisor.worker import members
from tests.bench.client import prompt

SAMPLE_S = 10.0
SETTLE_PART = 0.25
"""The first part of the run is not judged: caches fill, the allocator finds its size."""
REQUEST_S = 300.0
MIB = 1024.0**2
LIMITS = {"agent pss MiB": 6.0, "worker pss MiB": 48.0, "agent fds": 8.0, "worker fds": 8.0, "agent threads": 4.0,
          "worker threads": 4.0, "shm files": 2.0, "sockets": 2.0}
"""Growth per hour that is taken for noise; in a short run, a quarter of it in all."""


@dataclass(kw_only=True)
class Tally:
    """What the clients saw. `answered`: status and body are what the kind of request should get."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    outcomes: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    first_s: list[float] = field(default_factory=list)
    tokens: int = 0
    unexpected: list[str] = field(default_factory=list)

    def note(self, kind: str, outcome: str, seconds: float, *, first_s: float | None = None, tokens: int = 0) -> None:
        with self.lock:
            self.outcomes[kind, outcome] += 1
            self.seconds[kind].append(seconds)
            self.tokens += tokens
            if first_s is not None:
                self.first_s.append(first_s)
            if outcome not in ("right", "refused"):
                self.unexpected.append(f"{time.strftime('%H:%M:%S')} {kind}: {outcome}")


class Client:
    """One user: a random kind of request after another. 429 and 503 are waited out as they ask for."""

    def __init__(self, args: argparse.Namespace, seed: int, tally: Tally, until: float) -> None:
        self.args, self.tally, self.until = args, tally, until
        self.random = random.Random(seed)
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {args.key}"} if args.key else {})

    def run(self) -> None:
        kinds: list[tuple[Callable[[], str], int]] = [
            (self.short, 6), (self.streamed, 6), (self.long_prompt, 2), (self.long_answer, 1), (self.kept_alive, 2),
            (self.gone_in_the_stream, 2), (self.gone_before_the_answer, 2), (self.bad_json, 1), (self.unknown_model, 1),
            (self.too_long, 1), (self.too_many_choices, 1), (self.closed_route, 1), (self.half_a_request, 1),
        ]
        methods, weights = zip(*kinds, strict=True)
        while time.monotonic() < self.until:
            method = self.random.choices(methods, weights)[0]
            began = time.monotonic()
            try:
                outcome = method()
            except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
                outcome = repr(error)[:200]
            self.tally.note(method.__name__, outcome, time.monotonic() - began)
            if outcome == "refused":
                time.sleep(1)
            time.sleep(self.random.uniform(0, self.args.pause))

    # ---- kinds of requests: each returns `right`, `refused`, or what was wrong ------------------------------------

    def short(self) -> str:
        return self._whole(self._prompt(8, 64), self.random.randint(1, 32))

    def long_prompt(self) -> str:
        return self._whole(self._prompt(500, self.args.long), self.random.randint(1, 8))

    def long_answer(self) -> str:
        return self._whole(self._prompt(8, 32), self.random.randint(128, 256))

    def streamed(self) -> str:
        began = time.monotonic()
        connection, response = self._ask({"prompt": self._prompt(8, 200), "max_tokens": 48, "stream": True})
        if response.status != 200:
            return self._refusal(response, connection)
        chunks, first = 0, 0.0
        last = b""
        for line in response:
            if line.startswith(b"data: "):
                first = first or time.monotonic() - began
                chunks, last = chunks + 1, line
        connection.close()
        if not last.startswith(b"data: [DONE]"):
            return f"the stream ended with {last[:80]!r} after {chunks} pieces"
        with self.tally.lock:
            self.tally.first_s.append(first)
            self.tally.tokens += chunks - 1
        return "right"

    def kept_alive(self) -> str:
        connection = self._connect()
        for _ in range(3):
            status, _ = self._exchange(connection, {"prompt": self._prompt(4, 16), "max_tokens": 4})
            if status in (429, 503):
                break
            if status != 200:
                return f"status {status}"
        connection.close()
        return "right"

    def gone_in_the_stream(self) -> str:
        connection, response = self._ask({"prompt": self._prompt(8, 64), "max_tokens": 400, "stream": True, "ignore_eos": True})
        if response.status != 200:
            return self._refusal(response, connection)
        for _ in range(self.random.randint(1, 12)):
            response.readline()
        connection.close()
        return "right"

    def gone_before_the_answer(self) -> str:
        connection = self._connect()
        connection.request("POST", "/v1/completions", self._body({"prompt": self._prompt(100, 600), "max_tokens": 200,
                                                                  "ignore_eos": True}), self.headers)
        time.sleep(self.random.uniform(0, 0.5))
        connection.close()
        return "right"

    def bad_json(self) -> str:
        return self._refused_with(400, '{"model": "default", "prompt": ')

    def unknown_model(self) -> str:
        return self._refused_with(404, json.dumps({"model": "nobody", "prompt": "x", "max_tokens": 1}))

    def too_long(self) -> str:
        return self._refused_with(400, self._body({"prompt": prompt(self.args.context + 10, 1), "max_tokens": 1}))

    def too_many_choices(self) -> str:
        return self._refused_with(400, self._body({"prompt": "x", "max_tokens": 1, "n": 999}))

    def closed_route(self) -> str:
        connection = self._connect()
        connection.request("POST", "/invocations", self._body({"prompt": "x", "max_tokens": 1}), self.headers)
        status = connection.getresponse().status
        connection.close()
        return "right" if status in (403, 404, 405) else f"status {status} from a route that is closed"

    def half_a_request(self) -> str:
        connection = self._connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "1000")
        connection.endheaders()
        connection.send(b'{"model": ')
        time.sleep(self.random.uniform(0, 0.3))
        connection.close()
        return "right"

    # ---- how they are sent --------------------------------------------------------------------------------------

    def _prompt(self, low: int, high: int) -> list[int]:
        return prompt(self.random.randint(low, high), self.random.getrandbits(32))

    def _whole(self, ids: list[int], tokens: int) -> str:
        connection, response = self._ask({"prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0})
        if response.status != 200:
            return self._refusal(response, connection)
        count = json.loads(response.read())["usage"]["completion_tokens"]
        connection.close()
        with self.tally.lock:
            self.tally.tokens += count
        return "right" if count == tokens else f"{count} of {tokens} tokens"

    def _refused_with(self, status: int, body: str) -> str:
        connection = self._connect()
        connection.request("POST", "/v1/completions", body, self.headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status == status and b"error" in text:
            return "right"
        return "refused" if response.status in (429, 503) else f"status {response.status}: {text[:120]!r}"

    def _refusal(self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> str:
        text = response.read(200)
        connection.close()
        if response.status in (429, 503):
            return "refused" if response.headers["Retry-After"] else f"status {response.status} without Retry-After"
        return f"status {response.status}: {text!r}"

    def _ask(self, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connect()
        connection.request("POST", "/v1/completions", self._body(body), self.headers)
        return connection, connection.getresponse()

    def _exchange(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> tuple[int, bytes]:
        connection.request("POST", "/v1/completions", self._body(body), self.headers)
        response = connection.getresponse()
        return response.status, response.read()

    def _body(self, body: dict[str, Any]) -> str:
        return json.dumps({"model": "default", **body})

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.args.host, self.args.port, timeout=REQUEST_S)


# ---- measuring -----------------------------------------------------------------------------------------------------


def read_status(runtime: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((runtime / "status.json").read_text())
    return status


def sample(runtime: Path) -> dict[str, float]:
    """One look at both parts of the service; a part that is not there right now has no figures."""
    found: dict[str, float] = {"at": time.monotonic(), "shm files": sum(1 for _ in Path("/dev/shm").iterdir()),
                               "sockets": sum(path.is_socket() for path in runtime.iterdir())}
    status = read_status(runtime)
    found["restarts"] = float(sum((status.get("restarts_total") or {}).values()))
    agent = [psutil.Process(status["agent"]["pid"])]
    worker = members(status["worker_pid"]) if status.get("worker_pid") else []
    for name, processes in (("agent", agent), ("worker", worker)):
        try:
            found |= _measured(name, processes)
        except (psutil.Error, OSError):
            continue  # it ended between two looks
    return found


def _measured(name: str, processes: Sequence[psutil.Process]) -> dict[str, float]:
    if not processes:
        return {}
    rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in processes]
    return {
        f"{name} pss MiB": sum(_kib(text, "Pss:") for text in rollups) / 1024,
        f"{name} rss MiB": sum(_kib(text, "Rss:") for text in rollups) / 1024,
        f"{name} fds": float(sum(process.num_fds() for process in processes)),
        f"{name} threads": float(sum(process.num_threads() for process in processes)),
        f"{name} cpu s": sum(sum(process.cpu_times()[:2]) for process in processes),
    }


def _kib(text: str, key: str) -> float:
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(key)))


def growth_per_hour(samples: Sequence[dict[str, float]], name: str) -> float | None:
    """Slope of the line through the samples; None where there are too few."""
    points = [(s["at"], s[name]) for s in samples if name in s]
    if len(points) < 4:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope * 3600


def verdict(growth: dict[str, float | None], hours: float, restarts: float, unexpected: int) -> list[str]:
    """What speaks against the service; empty: nothing. `hours`: how long the growth was measured."""
    bad = [f"{name} grows by {value:.1f} an hour (limit {LIMITS[name]:g})" for name, value in growth.items()
           if name in LIMITS and value is not None and value * hours > LIMITS[name] * max(hours, 0.25)]
    if restarts:
        bad.append(f"the worker was restarted {restarts:.0f} times")
    if unexpected:
        bad.append(f"{unexpected} outcomes were unexpected")
    return bad


def show(samples: Sequence[dict[str, float]], settled: Sequence[dict[str, float]], tally: Tally, seconds: float) -> dict[str, Any]:
    names = sorted({name for s in samples for name in s} - {"at", "restarts"})
    growth = {name: growth_per_hour(settled, name) for name in names if not name.endswith("cpu s")}
    print(f"\n{'':24} {'first':>10} {'settled':>10} {'last':>10} {'max':>10} {'per hour':>10}")
    for name in names:
        values = [s[name] for s in samples if name in s]
        slope = growth.get(name)
        print(f"{name:24} {values[0]:10.1f} {next((s[name] for s in settled if name in s), float('nan')):10.1f} {values[-1]:10.1f} "
              f"{max(values):10.1f} {'' if slope is None else f'{slope:+10.1f}'}")
    print(f"\n{'kind':26} {'right':>7} {'refused':>8} {'other':>6} {'p50 s':>8} {'p95 s':>8} {'max s':>8}")
    for kind in sorted(tally.seconds):
        times = sorted(tally.seconds[kind])
        right, refused = tally.outcomes[kind, "right"], tally.outcomes[kind, "refused"]
        print(f"{kind:26} {right:7} {refused:8} {len(times) - right - refused:6} {_quantile(times, 0.5):8.2f} {_quantile(times, 0.95):8.2f} "
              f"{times[-1]:8.2f}")
    first = sorted(tally.first_s)
    requests = sum(tally.outcomes.values())
    print(f"\n{requests} requests in {seconds:.0f} s, {tally.tokens} tokens ({tally.tokens / seconds:.1f}/s); first token p50 "
          f"{_quantile(first, 0.5):.2f} s, p95 {_quantile(first, 0.95):.2f} s")
    restarts = max(s["restarts"] for s in samples) - samples[0]["restarts"]
    hours = (settled[-1]["at"] - settled[0]["at"]) / 3600 if settled else 0.0
    bad = verdict(growth, hours, restarts, len(tally.unexpected))
    for line in tally.unexpected[:20]:
        print(f"unexpected: {line}")
    print("verdict: " + ("; ".join(bad) if bad else "nothing grows, nothing was restarted, every outcome was right"))
    return {"seconds": seconds, "requests": requests, "tokens": tally.tokens, "growth_per_hour": growth, "restarts": restarts,
            "unexpected": tally.unexpected, "samples": list(samples), "verdict": bad,
            "outcomes": {f"{kind} {outcome}": count for (kind, outcome), count in tally.outcomes.items()}}


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else float("nan")


def main() -> int:
    home = os.environ.get("APPLIANCE_HOME")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.5, help="longest pause of a client between two requests, seconds")
    parser.add_argument("--long", type=int, default=1500, help="tokens of the longest prompt")
    parser.add_argument("--key", help="API key")
    parser.add_argument("--runtime", type=Path, default=Path(home) / "run" if home else Path("/run/appliance"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    status = read_status(args.runtime)
    if status["state"] not in ("ready", "busy"):
        raise SystemExit(f"the service is not ready: {status['sentence']}")
    args.context = int(status["context"])
    args.long = min(args.long, args.context - 64)
    tally = Tally()
    began = time.monotonic()
    clients = [Client(args, args.seed * 1000 + n, tally, began + args.seconds) for n in range(args.clients)]
    threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
    samples = [sample(args.runtime)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < began + args.seconds + REQUEST_S:
        time.sleep(min(SAMPLE_S, args.seconds / 20))
        samples.append(sample(args.runtime))
        if len(samples) % 30 == 0:
            print(f"{time.monotonic() - began:.0f} s: {sum(tally.outcomes.values())} requests, agent {samples[-1].get('agent pss MiB', 0):.1f} MiB, "
                  f"worker {samples[-1].get('worker pss MiB', 0):.0f} MiB, {len(tally.unexpected)} unexpected", flush=True)
    if hung := sum(thread.is_alive() for thread in threads):
        tally.unexpected.append(f"{hung} clients hang")
    seconds = time.monotonic() - began
    settled = [s for s in samples if s["at"] - began >= args.seconds * SETTLE_PART and s["at"] - began <= args.seconds]
    report = show(samples, settled, tally, seconds)
    if args.json:
        args.json.write_text(json.dumps(report))
    return 1 if report["verdict"] else 0


if __name__ == "__main__":
    sys.exit(main())
