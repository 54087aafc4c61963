"""The memory arithmetic against real workers: predicted and measured peak of each phase, model by model, ceiling by ceiling.

    python -m tests.bench.memory [--models gqa,mha] [--ceilings 2,4,8] [--json FILE]

Each row is one start of the planned worker alone (the agent is measured apart): its process tree is sampled every 0.2 s,
the phase read from its log. Models are random ones that differ in what memory depends on (`random_llama`) and the
default one. Where a control group can be made, the worker runs inside one of the ceiling's size, so that a plan that
does not fit is killed and fails here. Ends with status 1 when a phase is off by more than 10 %.

Measured is PSS, summed; pages of files count as if no other program had them mapped, whatever else runs beside.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance import budget, settings
from appliance.budget import GIB, PHASES, Shape
from appliance.client import UnixConnection
from appliance.decisions import BLOCK
from appliance.directories import Directories, from_process
from appliance.node import Node, read_node
from appliance.store import Store
from appliance.supervisor import folders, health, worker
from tests.bench import machine, models
from tests.bench.build_llama import REPOSITORY
from tests.bench.client import prompt
from tests.bench.report import memory_cells, memory_tables

MODELS = ("smollm2", "gqa", "mha", "mqa", "window", "qwen2", "qwen3", "granite", "gemma2", "1b")
ADD_FLAGS = {"gemma2": ("--table-bits", "16")}
"""vLLM gives Gemma's embedding table no quantization method."""
CEILINGS_GIB = (2.0, 3.0, 6.0)
HOME = REPOSITORY / "build/bench/memory"
LIMIT = 0.10
SAMPLE_S = 0.2
START_S = 300.0
STEADY_S = 3.0
LONG_PROMPT, SHORT_PROMPT, ANSWER = 1024, 128, 16
PAGE = 4096
FRAME, PRESENT_FILE = (1 << 55) - 1, 1 << 63 | 1 << 61
"""Of an entry of /proc/PID/pagemap: the frame's number (root only); present, and a page of a file."""
FILES_S = 1.0
"""Pages of files are counted so often: it takes longer than a sample."""
GROUPS = Path("/sys/fs/cgroup/memory/appliance-bench"), Path("/sys/fs/cgroup/appliance-bench")
PHASE_LINES = (
    (re.compile(r"Warming up model for the compilation"), "compile"),
    (re.compile(r"Explicitly set \("), "warm-up"),
)
"""A line of the worker's log -> the phase that begins with it. The last one, `serve`, begins with the first answer."""
ENGINE_CONTEXTS = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")


class Failed(Exception):
    """A worker did not start, ended, or refused what it was asked."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Bytes of a process tree. `files`: pages of files, shared ones once."""

    anonymous: int
    files: int

    @property
    def total(self) -> int:
        return self.anonymous + self.files


def sample(pids: list[int], files: int | None) -> Sample:
    """`files`: what `file_bytes` found a moment ago; None where it cannot tell, and PSS has to do."""
    anonymous = shared_with_all = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            rollup = _kib(f"/proc/{pid}/smaps_rollup")
            anonymous += rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0)
            shared_with_all += rollup.get("Pss_File", 0)
    return Sample(anonymous=anonymous, files=shared_with_all if files is None else files)


def file_bytes(pids: list[int]) -> int | None:
    """Pages of files that these processes have mapped, each page once; None unless root.

    PSS would give part of a library's pages to other programs that use it, whatever runs beside.
    """
    frames: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/pagemap", "rb") as pagemap:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) < 6 or not fields[5].startswith("/") or fields[5].startswith(("/dev/", "/memfd")):
                    continue
                first, last = (int(address, 16) // PAGE for address in fields[0].split("-"))
                pagemap.seek(first * 8)
                entries = array("Q", pagemap.read((last - first) * 8))
                frames.update(entry & FRAME for entry in entries if entry & PRESENT_FILE == PRESENT_FILE)
    frames.discard(0)
    return len(frames) * PAGE or None


def _kib(path: str) -> dict[str, int]:
    found = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


class Group:
    """A memory control group of one size for one worker; nothing where none can be made."""

    def __init__(self, limit_bytes: int) -> None:
        self.folder: Path | None = None
        for folder in GROUPS:
            limit = "memory.limit_in_bytes" if "memory" in folder.parts else "memory.max"
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
                (folder / limit).write_text(str(limit_bytes))
                self.folder = folder
                return

    def hold(self, pid: int) -> None:
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def add_model(name: str, home: Path) -> None:
    """Store a model and lay out its weights, unless it is there."""
    from tests.bench.services import applianctl

    if name in Store(home / "store").names():
        return
    if name == "smollm2":
        applianctl(home, "model", "add", name)
        return
    source = models.source_folder(name, Store(home / "store").get("smollm2").path)
    applianctl(home, "model", "add", str(source), "--name", name, *ADD_FLAGS.get(name, ()))


def node(name: str, home: Path, ceiling: int, extra: Mapping[str, Any]) -> tuple[Node, Directories]:
    env = {**os.environ, "APPLIANCE_HOME": str(home)}
    parsed = settings.parse(json.dumps({"memory": {"ceiling": ceiling}, **extra}))
    places = from_process(env)
    return read_node(parsed, places, models.worker_python(), env=env, model_name=name), places


@contextlib.contextmanager
def running(found: Node, places: Directories, group: Group) -> Iterator[worker.WorkerTree]:
    """The planned worker, until the block ends. What it would compile is not compiled yet."""
    if "--enforce-eager" not in found.plan.full.argv:
        shutil.rmtree(found.places.cache, ignore_errors=True)
    folders.prepare(found.places, places.cache, fingerprint=found.host.fingerprint)
    places.state.mkdir(parents=True, exist_ok=True)
    rung = found.plan.full
    tree = worker.start(worker.WorkerCommand(
        python=models.worker_python(), argv=rung.argv, env={"PATH": os.environ["PATH"], **rung.env},
        log=places.state / "worker.log", cwd=Path(found.places.cache), runtime=places.runtime))
    group.hold(tree.pid)
    try:
        yield tree
    finally:
        tree.ask_to_end()
        deadline = time.monotonic() + 30
        while tree.status() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        while not tree.kill():
            time.sleep(0.1)


class Watch:
    """Samples one worker phase by phase."""

    def __init__(self, tree: worker.WorkerTree, log: Path) -> None:
        self.tree, self.log = tree, log
        self.phase = "load"
        self.peaks: dict[str, Sample] = {}
        self.lines: list[str] = []
        self.files: int | None = None
        self.counted = 0.0

    def look(self) -> None:
        """One sample. Raises Failed when the worker has ended."""
        if self.tree.status() is not None:
            root = next((line for line in self.lines if re.search(r"EngineCore.*Error", line)), "")
            raise Failed(f"the worker ended with {self.tree.status()}: {root or self.log.read_text()[-3000:]}")
        pids = [process.pid for process in self.tree.members()]
        if time.monotonic() - self.counted > FILES_S:
            self.files, self.counted = file_bytes(pids), time.monotonic()
        now = sample(pids, self.files)
        new = self.tree.new_log_lines()  # after the sample: what it says may have begun while it was taken
        self.lines += new
        for line in new:
            for pattern, phase in PHASE_LINES:
                if pattern.search(line) and phase != self.phase:
                    # Weights are mapped at the end of a load, between two samples: pages of files only grow in number.
                    self.files, self.counted = file_bytes(pids), time.monotonic()
                    last = self.peaks[self.phase]
                    if phase == "compile":  # it begins slowly: what is held when it is announced was loaded
                        last = max(last, sample(pids, self.files), key=lambda held: held.total)
                    self.peaks[self.phase] = replace(last, files=max(last.files, self.files or 0))
                    self.phase, now = phase, replace(now, files=self.files or now.files)
        if self.phase not in self.peaks or now.total > self.peaks[self.phase].total:
            self.peaks[self.phase] = now

    def until(self, done: Future[Any] | float) -> None:
        """Go on sampling until a call has returned or so many seconds have passed."""
        end = time.monotonic() + (done if isinstance(done, float) else START_S)
        while time.monotonic() < end and not (isinstance(done, Future) and done.done()):
            self.look()
            time.sleep(SAMPLE_S)


def complete(socket: Path, ids: list[int], tokens: int, **more: Any) -> None:
    """One completion. Raises Failed when it is refused."""
    connection = UnixConnection(socket, timeout_s=START_S)
    body = {"model": "default", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise Failed(f"status {answer.status}: {text[:500]!r}")


def load(socket: Path, seats: int, context: int) -> None:
    """All seats taken, the batch full, then one long prompt."""
    short = min(SHORT_PROMPT, context - ANSWER)
    with ThreadPoolExecutor(seats) as pool:
        list(pool.map(lambda user: complete(socket, prompt(short, user), ANSWER), range(seats)))
    complete(socket, prompt(min(LONG_PROMPT, context - ANSWER), 99), ANSWER)


def measure(found: Node, places: Directories, ceiling: int, *, logprobs: bool) -> dict[str, Any]:
    plan, socket = found.plan, Path(found.places.socket)
    group = Group(ceiling)
    with running(found, places, group) as tree, ThreadPoolExecutor(1) as pool:
        watch = Watch(tree, places.state / "worker.log")
        end = time.monotonic() + START_S
        while not health.listening(socket):
            watch.look()
            if time.monotonic() > end:
                raise Failed("the worker does not start")
            time.sleep(SAMPLE_S)
        watch.until(pool.submit(health.answer, socket, model="default", timeout_s=START_S))
        watch.until(0.5)
        idle = watch.peaks[watch.phase]
        watch.phase = "serve"
        future = pool.submit(load, socket, plan.full.running, plan.full.context)
        watch.until(future)
        future.result()
        watch.until(STEADY_S)
        if logprobs:
            watch.phase = "log-probabilities"
            future = pool.submit(complete, socket, prompt(min(1000, plan.full.context - 2), 7), 1, prompt_logprobs=1)
            watch.until(future)
            future.result()
    group.remove()
    phases = {}
    batch = dict(zip(plan.full.argv, plan.full.argv[1:], strict=False))["--max-num-batched-tokens"]
    one = Shape(context=plan.full.context, sequences=1, batch_tokens=int(batch), running=1, compile=False)
    sequences = plan.full.kv_bytes / budget.kv_request_bytes(found.model, one, BLOCK)
    for phase in PHASES:
        predicted, peak = budget.phase_bytes(plan.memory, phase), watch.peaks.get(phase)
        if peak is not None:
            phases[phase] = {"predicted": predicted, "measured": peak.total, "anonymous": peak.anonymous,
                             "files": peak.files, "error": predicted / peak.total - 1}
    engine = next((match[1] for line in watch.lines if (match := ENGINE_CONTEXTS.search(line))), None)
    return {
        "model": plan.model, "ceiling": ceiling, "usable": plan.usable_bytes, "context": plan.full.context,
        "kv bytes": plan.full.kv_bytes, "running": plan.full.running, "phases": phases, "enforced": group.folder is not None,
        "idle": idle.total, "engine contexts": float(engine) if engine else None,
        "plan": {line.item: line.bytes for line in plan.memory},
        "log-probabilities": watch.peaks["log-probabilities"].total if logprobs else None,
        "contexts": sequences,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ceilings", default=",".join(f"{gib:g}" for gib in CEILINGS_GIB), metavar="GIB,...")
    parser.add_argument("--settings", default="{}", help="further settings, as JSON")
    parser.add_argument("--logprobs", action="store_true", help="also a request for the log-probabilities of a prompt")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    (HOME / "appliance.yaml").write_text("")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: list[dict[str, Any]] = []
    result = {"bench": "memory", "machine": machine.facts(), "rows": rows}
    add_model("smollm2", HOME)
    for name in args.models.split(","):
        add_model(name, HOME)
        for gib in args.ceilings.split(","):
            ceiling = int(float(gib) * GIB)
            found, places = node(name, HOME, ceiling, json.loads(args.settings))
            if found.plan.refused:
                rows.append({"model": name, "ceiling": ceiling, "refused": found.plan.refused.why})
            else:
                try:
                    rows.append(measure(found, places, ceiling, logprobs=args.logprobs))
                except Failed as error:
                    rows.append({"model": name, "ceiling": ceiling, "refused": f"FAILED: {error}"})
            print(" | ".join(memory_cells(rows[-1])), flush=True)
            if args.json:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + memory_tables(result))
    errors = [(abs(cell["error"]), f"{row['model']}, {row['ceiling'] / GIB:g} GiB, {phase}")
              for row in rows for phase, cell in row.get("phases", {}).items()]
    worst, where = max(errors)
    print(f"\nworst: {worst:.1%} ({where}); {len(errors)} figures in {len(rows)} rows, limit {LIMIT:.0%}")
    failed = [row for row in rows if str(row.get("refused", "")).startswith("FAILED")]
    return int(worst > LIMIT or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
