"""What serving costs here, ours against llama.cpp, in one run: speed, memory, start.

    python -m tests.bench.serving [--model smollm2|1b|hollow] [--peer Q4_K_M] [--peer Q4_0] [--no-peers]
                                  [--isa native|avx2] [--threads N] [--repeat 5] [--starts 3]
                                  [--answer TOKENS] [--json FILE]

1. Starts: cold (nothing of ours quantized, compiled or prepared; the peer's file not in the page cache), then warm
   ones in turn. The random models are in the store before: `serve` quantizes the default model only.
2. Speed: all servers stay up and take turns, request by request; an idle server takes no processor time (checked: every
   measurement waits until the machine is idle). 32-token prompts and 128 greedy tokens: 1, 2, 4 and 8 streams, tokens
   per second in all; one streamed answer for pure decoding; a 512-token prompt for prefill.
3. llama-bench on the same files (pp512, tg128): the peer without its server.
4. Memory: PSS of all processes after the load, with and without the key/value cache.

`hollow`: SmolLM2's layers and vocabulary with linears that cost nothing (random_llama.py): ms per step is the
server's own time. Every figure: median, least and greatest of the repeats; ratios are of pairs.
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench import build_llama, client, machine, models, services
from tests.bench.services import Llama, Ours, Server

STREAMS = (1, 2, 4, 8)
PROMPT_TOKENS, ANSWER_TOKENS, PREFILL_TOKENS = 32, 128, 512
OURS = "ours"
MIB = 1 << 20


class Bench:
    """One run: where things are, and how each server is started."""

    def __init__(self, args: argparse.Namespace, home: Path) -> None:
        self.args, self.home = args, home
        self.files: dict[str, Path] = {} if args.no_peers else {q: models.peer_file(args.model, q) for q in args.peer}
        self.names = [OURS, *self.files]
        self.ports = {name: args.port + number for number, name in enumerate(self.names)}

    def start(self, name: str) -> Server:
        if name == OURS:
            return Ours(self.home, self.args.model, self.ports[name])
        return Llama(self.files[name], self.args.isa, self.args.threads, self.ports[name],
                     self.home / f"llama-{name}.log")

    def prepare(self) -> dict[str, Any]:
        """The random models into our store; returns what that cost."""
        if self.args.model == "smollm2":
            return {}
        services.applianctl(self.home, "model", "add", "smollm2")
        stored = self.home / "store" / "objects" / (self.home / "store" / "names" / "smollm2").read_text().strip()
        source = models.source_folder(self.args.model, stored)
        began = time.monotonic()
        table = ["--table-bits", "4"] if self.args.model == "hollow" else []
        services.applianctl(self.home, "model", "add", str(source), "--name", self.args.model, *table)
        return {"model add s": time.monotonic() - began}

    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads(services.applianctl(self.home, "plan", "--model", self.args.model, "--json"))
        return plan


def starts(bench: Bench, running: dict[str, Server]) -> dict[str, Any]:
    """Cold once, then warm in turn; the servers of the last round are left in `running`."""
    result: dict[str, Any] = {name: {} for name in bench.names}
    warm: dict[str, list[float]] = {name: [] for name in bench.names}
    for number in range(bench.args.starts + 1):
        for name in bench.names:
            if number == 0 and name != OURS:
                services.evict(bench.files[name])
            result[name]["idle before"] = machine.wait_quiet()
            server = running[name] = bench.start(name)
            seconds = server.wait_ready()
            if number == 0:
                result[name]["cold start s"] = round(seconds, 2)
            else:
                warm[name].append(seconds)
            result[name]["memory at ready"] = services.memory(server.pids()).to_dict()
            if isinstance(server, Ours):
                result[name].setdefault("peak MiB by phase", {})["cold" if number == 0 else "warm"] = {
                    phase: used // MIB for phase, used in server.peaks.items()}
            if number < bench.args.starts:
                result[name]["stop s"] = round(services.stop(running.pop(name)), 2)
    for name, seconds_of_all in warm.items():
        if seconds_of_all:
            result[name]["warm start s"] = machine.Samples(values=tuple(seconds_of_all)).to_dict()
    return result


def speeds(running: dict[str, Server], repeat: int, answer: int) -> dict[str, dict[str, Any]]:
    """Every metric with all servers in turn: metric -> server -> samples, and ours over each peer."""
    seeds = iter(range(1, 1 << 30))

    def quiet(measure: Callable[[int], float]) -> Callable[[int], float]:
        def run(_: int) -> float:
            idle.append(machine.wait_quiet(5.0))
            return measure(next(seeds))

        return run

    def decode(port: int) -> Callable[[int], float]:
        def run(seed: int) -> float:
            found = client.stream(port, client.prompt(PROMPT_TOKENS, seed), answer)
            return (answer - 1) / (found.last_s - found.first_s)

        return run

    def prefill(port: int) -> Callable[[int], float]:
        return lambda seed: PREFILL_TOKENS / client.complete(port, client.prompt(PREFILL_TOKENS, seed), 1)

    def streams(port: int, count: int) -> Callable[[int], float]:
        return lambda seed: client.together(port, count, PROMPT_TOKENS, answer, seed)

    ports = {name: server.port for name, server in running.items()}
    metrics: dict[str, dict[str, Callable[[int], float]]] = {
        "decode tok/s": {name: decode(port) for name, port in ports.items()},
        f"prefill {PREFILL_TOKENS} tok/s": {name: prefill(port) for name, port in ports.items()},
    }
    for count in STREAMS:
        metrics[f"{count} streams tok/s"] = {name: streams(port, count) for name, port in ports.items()}
    idle: list[float] = []
    for port in ports.values():  # first requests of their kind are slower everywhere
        client.together(port, max(STREAMS), PROMPT_TOKENS, min(16, answer), next(seeds))
        client.complete(port, client.prompt(PREFILL_TOKENS, next(seeds)), 1)
    result: dict[str, dict[str, Any]] = {}
    for metric, measures in metrics.items():
        found = machine.alternate({name: quiet(measure) for name, measure in measures.items()}, repeat)
        result[metric] = {name: samples.to_dict() for name, samples in found.items()}
        for name in ports:
            if name != OURS:
                result[metric][f"ours / {name}"] = machine.ratio(found[OURS], found[name]).to_dict()
        print_metric(metric, result[metric])
    result["idle before"] = {"median": statistics.median(idle), "min": min(idle)}
    result["suspicious"] = {name: reason for name in ports if (reason := starved(result, name))}
    return result


def starved(result: dict[str, dict[str, Any]], name: str) -> str | None:
    """Why the streamed figure of a server cannot be right, or None: a client that gets no processor time reads many
    tokens at once and sees a decode speed that the whole answer denies."""
    streamed, whole = (result[metric][name]["median"] for metric in ("decode tok/s", "1 streams tok/s"))
    if streamed <= 1.5 * whole:
        return None
    return f"{streamed:.1f} tok/s streamed, {whole:.1f} for whole answers: the machine was not quiet"


def llama_bench(bench: Bench) -> dict[str, Any]:
    """pp512 and tg128 of each file, in turn."""
    if not bench.files:
        return {}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in bench.files}
    for _ in range(bench.args.repeat):
        for name, file in bench.files.items():
            done = subprocess.run(
                [str(build_llama.binary("llama-bench", bench.args.isa)), "-m", str(file), "-t", str(bench.args.threads),
                 "-p", str(PREFILL_TOKENS), "-n", str(bench.args.answer), "-r", "1", "-o", "json"],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
            for test in json.loads(done.stdout):
                kind = f"pp{test['n_prompt']}" if test["n_prompt"] else f"tg{test['n_gen']}"
                found[name].setdefault(kind, []).append(test["avg_ts"])
    return {name: {kind: machine.Samples(values=tuple(values)).to_dict() for kind, values in kinds.items()}
            for name, kinds in found.items()}


def kv_bytes(plan: dict[str, Any]) -> int:
    """The key/value cache that our plan sets aside."""
    return next(int(item["bytes"]) for item in plan["memory"] if item["item"] == "key/value cache")


def memory_after(server: Server, kv: int) -> dict[str, Any]:
    """Memory after the load. Both servers write zeros to their whole cache of `kv` bytes at the start: it is resident."""
    found = services.memory(server.pids())
    return {**found.to_dict(), "key/value cache MiB": kv // MIB, "pss minus cache MiB": (found.pss_bytes - kv) // MIB}


def run(args: argparse.Namespace) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp(prefix="bench-"))
    running: dict[str, Server] = {}
    try:
        services.write_config(home, args.isa, args.threads, {})
        bench = Bench(args, home)
        result: dict[str, Any] = {"bench": "serving", "model": args.model, "isa": args.isa, "threads": args.threads,
                                  "answer tokens": args.answer, "machine": machine.facts(), "files MB": {
                                      name: round(file.stat().st_size / 1e6, 1) for name, file in bench.files.items()}}
        result |= bench.prepare()
        result["starts"] = starts(bench, running)
        print(json.dumps(result["starts"], indent=1), flush=True)
        result["speeds"] = speeds(running, args.repeat, args.answer)
        plan, peer_kv = bench.plan(), services.KV_TOKENS * models.kv_bytes_per_token(args.model)
        result["memory"] = {name: memory_after(server, kv_bytes(plan) if name == OURS else peer_kv)
                            for name, server in running.items()}
        result["planned MiB"] = {phase: sum(i["bytes"] for i in plan["memory"] if phase in i["phases"]) // MIB
                                 for phase in ("load", "compile", "warm-up", "serve")}
        result["kernels"] = {choice["name"]: choice["value"] for choice in plan["choices"]}
        if args.model == "hollow":
            one = result["speeds"]["decode tok/s"][OURS]["median"]
            many = result["speeds"][f"{max(STREAMS)} streams tok/s"][OURS]["median"] / max(STREAMS)
            result["ms per step"] = {"1 stream": round(1000 / one, 2), f"{max(STREAMS)} streams": round(1000 / many, 2)}
        for server in running.values():
            services.stop(server)
        running.clear()
        result["llama-bench"] = llama_bench(bench)
        return result
    finally:
        for server in running.values():
            server.process.terminate()
            server.process.wait(timeout=120)
        shutil.rmtree(home, ignore_errors=True)


def print_metric(metric: str, found: dict[str, Any]) -> None:
    words = [f"{name} {one['median']:.2f} ({one['min']:.2f}-{one['max']:.2f})" for name, one in found.items()]
    print(f"{metric:22} " + ", ".join(words), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["smollm2", "1b", "hollow"], default="smollm2")
    parser.add_argument("--peer", action="append", choices=models.QUANTS, help="default: all")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--isa", choices=list(build_llama.ISAS), default="native")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--answer", type=int, default=ANSWER_TOKENS, metavar="TOKENS",
                        help=f"length of an answer (default {ANSWER_TOKENS}; less only to try whether everything runs)")
    parser.add_argument("--starts", type=int, default=3, help="warm starts of each server (at least 1)")
    parser.add_argument("--port", type=int, default=8177)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    args.peer = args.peer or list(models.QUANTS)
    args.no_peers = args.no_peers or args.model == "hollow"
    if not args.no_peers:
        build_llama.build(args.isa)
        build_llama.build("native")  # its llama-quantize makes the files
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends its servers
    result = run(args)
    print(json.dumps({key: value for key, value in result.items() if key not in ("speeds", "starts")}, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
