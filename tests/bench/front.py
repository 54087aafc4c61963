"""What the front door costs: `python -m tests.bench.front`, and with `--home DIR` on the running agent of that folder.

Alone: a door and its Board in a process of their own, before an upstream that has its answers ready. Reported: CPU time
of the door for each event of a stream and for each request, the time to the first event that it adds, the time of a
refusal among 200 requests at once, resident memory idle and then.

With `--home`: the agent's part of the CPU time at 1 and 8 streams; then the same requests to the worker's unix socket and
through the public port, in pairs one after the other with the order changing. The client is the same for both: it counts
events and looks at the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

EVENT = (b'data: {"id":"cmpl-1234567890abcdef1234567890abcdef","object":"chat.completion.chunk","created":1764447136,'
         b'"model":"default","choices":[{"index":0,"delta":{"content":" the"},"logprobs":null,"finish_reason":null}]}\n\n')
EVENTS = 500
FIRSTS = 300
PACE_S = 0.004
"""Between the events of one stream: at 8 streams 2000 events a second, three times what the default model makes."""

DOOR = """
import sys, time
from pathlib import Path
from appliance.board import Board, Gate
from appliance.front.door import FrontDoor
from appliance.keys import KeyRing
from appliance.settings import Listen, Settings
home, port = Path(sys.argv[1]), int(sys.argv[2])
board = Board()
board.gate = Gate(open=True, reason="")
door = FrontDoor(settings=Settings(listen=Listen(port=port)), board=board, worker_socket=home / "worker.sock",
                 agent_socket=home / "agent.sock", keys=KeyRing(home / "keys.json"))
door.start()
print("open", flush=True)
while True:
    board.publish({"ready": True, "state": "ready", "max_running": int(sys.argv[3])})
    time.sleep(0.5)
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where requests go: a unix socket or a port of this machine."""

    socket: Path | None = None
    port: int = 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.socket:
            return await asyncio.open_unix_connection(str(self.socket))
        return await asyncio.open_connection("127.0.0.1", self.port)


@dataclass(frozen=True, kw_only=True)
class Run:
    events: int
    first_s: float
    seconds: float


async def stream(place: Place, body: dict[str, Any]) -> Run:
    """One streamed request; the connection is there before the clock starts."""
    reader, writer = await place.connect()
    data = json.dumps(body).encode()
    began = time.perf_counter()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
    events, first, tail = 0, 0.0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        piece = await reader.read(65536)
        if not piece:
            raise SystemExit("the stream broke off")
        events += piece.count(b"data: {")
        if events and not first:
            first = time.perf_counter() - began
        tail = (tail + piece)[-64:]
    seconds = time.perf_counter() - began
    writer.close()
    return Run(events=events, first_s=first, seconds=seconds)


async def streams(place: Place, count: int, body: Callable[[], dict[str, Any]]) -> float:
    """Events a second of `count` streams at the same time."""
    began = time.perf_counter()
    runs = await asyncio.gather(*(stream(place, body()) for _ in range(count)))
    return sum(run.events for run in runs) / (time.perf_counter() - began)


def prompt(tokens: int) -> dict[str, Any]:
    """A completion of exactly `tokens` tokens of a prompt that no cache holds."""
    return {"model": "default", "prompt": [random.randint(1000, 48000) for _ in range(32)], "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True, "stream": True}


UPSTREAM = """
import asyncio, sys
event, count, pace = sys.argv[2].encode(), int(sys.argv[3]), float(sys.argv[4])
chunk = b"%x\\r\\n%s\\r\\n" % (len(event), event)
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = next(line for line in head.split(b"\\r\\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n")
            for _ in range(count):
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(pace)
            writer.write(b"0\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_unix_server(serve, sys.argv[1])
    print("open", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


def alone() -> dict[str, Any]:
    """The door without an agent and without a model."""
    with tempfile.TemporaryDirectory(prefix="door-") as folder:
        home, port = Path(folder), 20_000 + os.getpid() % 20_000
        programs = (
            [sys.executable, "-c", UPSTREAM, str(home / "worker.sock"), EVENT.decode(), str(EVENTS), str(PACE_S)],
            [sys.executable, "-c", DOOR, folder, str(port), "8"],
        )
        running = [subprocess.Popen(program, stdout=subprocess.PIPE) for program in programs]
        try:
            for process in running:
                assert process.stdout is not None
                process.stdout.readline()
            time.sleep(1)
            door = psutil.Process(running[1].pid)
            idle = {"idle_rss_mib": door.memory_info().rss / 2**20}
            return idle | asyncio.run(measure(home, port, door)) | crowd(port, door)
        finally:
            for process in running:
                process.kill()
                process.wait()


async def measure(home: Path, port: int, process: psutil.Process) -> dict[str, Any]:
    direct, door = Place(socket=home / "worker.sock"), Place(port=port)
    found: dict[str, Any] = {}
    for count in (1, 8):
        await streams(door, count, dict)
        before = sum(process.cpu_times()[:2])
        rates = [await streams(door, count, dict) for _ in range(3)]
        spent = sum(process.cpu_times()[:2]) - before
        found[f"cpu_us_per_event_{count}_streams"] = spent / (3 * count * EVENTS) * 1e6
        found[f"events_per_s_{count}_streams"] = statistics.median(rates)
    before = sum(process.cpu_times()[:2])
    firsts: dict[str, list[float]] = {"direct": [], "door": []}
    for _ in range(FIRSTS):
        for name, place in (("direct", direct), ("door", door)):
            reader, writer = await place.connect()
            began = time.perf_counter()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            while b"data: {" not in await reader.read(65536):
                pass
            firsts[name].append((time.perf_counter() - began) * 1e3)
            writer.close()
            await asyncio.sleep(0.01)
    found["cpu_ms_per_request"] = (sum(process.cpu_times()[:2]) - before) / FIRSTS * 1e3
    found["first_event_ms"] = {name: statistics.median(values) for name, values in firsts.items()}
    added = [b - a for a, b in zip(firsts["direct"], firsts["door"], strict=True)]
    found["first_event_added_ms"] = {"median": statistics.median(added), "p95": sorted(added)[int(len(added) * 0.95)]}
    return found


def crowd(port: int, process: psutil.Process) -> dict[str, Any]:
    """200 requests at once against 8 running and 16 waiting, each answer 2 s long."""
    script = Path(__file__).parents[1] / "process" / "crowd.py"
    asking = subprocess.Popen([sys.executable, str(script), str(port), "200", "{}"], stdout=subprocess.PIPE)
    highest = 0.0
    while asking.poll() is None:
        highest = max(highest, process.memory_info().rss / 2**20)
        time.sleep(0.05)
    answers = json.loads(asking.communicate()[0])
    refused = sorted(answer["seconds"] * 1e3 for answer in answers if answer["status"] == 429)
    return {"crowd_rss_mib": highest, "refused": len(refused), "refusal_ms_median": statistics.median(refused),
            "refusal_ms_slowest": refused[-1], "answered": sum(answer["status"] == 200 for answer in answers)}


def on_agent(home: Path, pairs: int) -> dict[str, Any]:
    """Direct and through the door of a running agent."""
    status = json.loads((home / "run" / "status.json").read_text())
    direct, door = Place(socket=home / "run" / "worker.sock"), Place(port=int(status["address"].rsplit(":", 1)[1].split("/")[0]))
    found: dict[str, Any] = {}

    async def one(place: Place, count: int, tokens: int) -> float:
        return await streams(place, count, lambda: prompt(tokens))

    async def first(place: Place) -> float:
        return (await stream(place, prompt(2))).first_s * 1e3

    async def compare(name: str, measured: Callable[[Place], Coroutine[Any, Any, float]], repeats: int) -> None:
        values: dict[str, list[float]] = {"direct": [], "door": []}
        for place in (direct, door):
            await measured(place)
        for turn in range(repeats):
            order = (("direct", direct), ("door", door))
            for label, place in order if turn % 2 else reversed(order):
                values[label].append(await measured(place))
        ratios = [b / a for a, b in zip(values["direct"], values["door"], strict=True)]
        found[name] = {"direct": statistics.median(values["direct"]), "door": statistics.median(values["door"]),
                       "ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios),
                       "difference": statistics.median([b - a for a, b in zip(values["direct"], values["door"], strict=True)])}

    def used() -> tuple[float, float]:
        """CPU seconds of the agent, and of the worker's processes."""
        worker = [psutil.Process(pid) for pid in status["pids"] if pid != status["agent"]["pid"]]
        return (sum(psutil.Process(status["agent"]["pid"]).cpu_times()[:2]),
                sum(sum(one.cpu_times()[:2]) for one in worker))

    async def share(count: int) -> None:
        """The agent's part of all CPU time that answering takes: holds on a busy machine too."""
        before = used()
        repeats = pairs or 3
        for _ in range(repeats):
            await one(door, count, 128)
        agent, worker = (b - a for a, b in zip(before, used(), strict=True))
        found[f"cpu_share_{count}_streams"] = {
            "agent_us_per_token": agent / (repeats * count * 128) * 1e6,
            "worker_us_per_token": worker / (repeats * count * 128) * 1e6, "agent_percent": 100 * agent / (agent + worker)}

    async def all_of_them() -> None:
        await share(1)
        await share(8)
        if not pairs:
            return
        await compare("tokens_per_s_1_stream", lambda place: one(place, 1, 128), pairs)
        await compare("tokens_per_s_8_streams", lambda place: one(place, 8, 128), pairs)
        await compare("first_token_ms", first, 5 * pairs)

    asyncio.run(all_of_them())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="APPLIANCE_HOME of a running agent")
    parser.add_argument("--pairs", type=int, default=12, help="0: the CPU time only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = on_agent(options.home, options.pairs) if options.home else alone()
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
