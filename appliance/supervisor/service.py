"""The service in the foreground: one agent, one worker, from a taken lock to an empty process list.

Order: lock -> port -> model -> plan -> worker -> loop -> stop. What can be refused in milliseconds comes before what
takes minutes. Rules: one agent per runtime folder (flock); whatever an earlier agent left running is
ended first; on every way out the worker tree is ended and the status file says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from appliance import __version__, disk, status
from appliance.budget import show
from appliance.directories import Directories, ensure
from appliance.errors import ApplianceError, TransientError
from appliance.identity import identity
from appliance.node import Node, read_node, refuse_early
from appliance.plan import Rung
from appliance.probe.cgroup import read_oom_kills
from appliance.probe.tree import Tree
from appliance.settings import Parsed
from appliance.supervisor import worker as worker_process
from appliance.supervisor.health import Endpoint, answer, check_port, listening
from appliance.supervisor.loop import Loop

TICK_S = 0.5
READY_TICK_S = 1.0
MEMORY_EVERY_S = 30.0
STOP_MARGIN_S = 15.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATH_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KEPT_CACHES = 2
"""The present host fingerprint's cache and the previous one."""

Say = Callable[[str], None]


class Service:
    """One run of `applianctl serve`. `say` receives each new sentence; `key` is the API key or None."""

    def __init__(self, parsed: Parsed, directories: Directories, worker_python: str, *,
                 env: Mapping[str, str], say: Say, key: str | None) -> None:
        self.parsed = parsed
        self.directories = directories
        self.worker_python = worker_python
        self.env = env
        self.say = say
        self.key = key
        self._stop_signal = 0
        self._may_interrupt = False
        self._began = time.time()
        self._status: dict[str, Any] = {"agent": identity(), "version": __version__, "state": "starting",
                                        "sentence": "starting", "started_at": self._began, "last_answer_at": None}

    def run(self, obtain_model: Callable[[], str]) -> None:
        """Serve until a signal or a fault. `obtain_model` makes sure the model is stored and returns its name.

        Raises the fault's ApplianceError when the worker ends by itself; returns after a clean stop.
        """
        for folder in (self.directories.state, self.directories.cache, self.directories.runtime):
            ensure(folder)
        with self._only_agent(), self._signals():
            try:
                self._serve(obtain_model)
            except ApplianceError as error:
                self._publish(state="failed", sentence=f"failed: {error.line}", exit_code=error.exit_code)
                raise

    def _serve(self, obtain_model: Callable[[], str]) -> None:
        for pid in worker_process.end_leftovers(self.directories.runtime):
            self.say(f"ended process {pid}, left by an earlier run")
        listen = self.parsed.settings.listen
        check_port(listen.host, listen.port)
        self._publish(state="preparing", sentence="preparing: looking for the model")
        with self._interruptible():
            refuse_early(self.parsed, self.directories, self.worker_python, env=self.env)
            name = obtain_model()
        self._publish(state="preparing", sentence="preparing: probing and planning")
        with self._interruptible():
            node = read_node(self.parsed, self.directories, self.worker_python, env=self.env, model_name=name)
        if refusal := node.plan.refused:
            raise refusal.error()
        if self._stop_signal:
            return
        self._supervise(node, node.plan.full)

    def _supervise(self, node: Node, rung: Rung) -> None:
        listen = self.parsed.settings.listen
        tls = self.parsed.settings.tls.cert is not None
        endpoint = Endpoint(host=listen.host, port=listen.port, tls=tls, key=self.key)
        self._describe(node, rung, endpoint)
        self.say(f"plan: {node.model.name} on {node.host.cpu.tier}, {rung.threads} threads, context {rung.context}, "
                 f"key/value cache {show(rung.kv_bytes)}, peak {show(node.plan.peak_bytes)} of "
                 f"{show(node.plan.usable_bytes or 0)}")
        with disk.mapped("cannot prepare the worker's folders", self.directories.cache):
            _prepare_folders(node, self.directories)
        env = {"PATH": self.env.get("PATH") or PATH_DEFAULT, **rung.env}
        if self.key:
            env["VLLM_API_KEY"] = self.key
        command = worker_process.WorkerCommand(
            python=self.worker_python, argv=rung.argv, env=env, log=self.directories.state / "worker.log",
            cwd=Path(node.places.cache), runtime=self.directories.runtime,
        )
        tree = Tree(root=Path("/"))
        oom_before = read_oom_kills(tree)
        worker = worker_process.start(command)
        loop = Loop(
            worker=worker, oom_kills=lambda: grown(oom_before, read_oom_kills(tree)),
            listening=lambda: listening(endpoint),
            answer=lambda timeout_s: answer(endpoint, model=node.model.name, timeout_s=timeout_s),
        )
        try:
            self._turn(loop, worker, endpoint)
        finally:
            grace = self.parsed.settings.drain_s + STOP_MARGIN_S if loop.state == "stopping" else 0.0
            if loop.state == "stopping":
                worker.stop(grace_s=grace)
                loop.stopped()
            else:
                worker.kill()
            self._publish_loop(loop, worker, time.time())
        if loop.fault is not None:
            raise loop.fault.exception()
        self.say("stopped: no worker process is left")

    def _turn(self, loop: Loop, worker: worker_process.WorkerTree, endpoint: Endpoint) -> None:
        said = ""
        was = ""
        while True:
            now = time.time()
            if self._stop_signal:
                loop.stopping()
                self._publish_loop(loop, worker, now)
                self.say(loop.sentence(now))
                return
            with contextlib.suppress(KeyboardInterrupt), self._interruptible():
                loop.tick(now)  # a probe may wait long for a hung engine: a signal ends the wait
            if self._stop_signal:
                continue
            sentence = loop.sentence(now)
            self._publish_loop(loop, worker, now)
            if loop.state == "ready" and was != "ready" and loop.last_answer is not None:
                self.say(f"ready: {endpoint.url}/v1 answered {loop.last_answer.text.strip()!r} in "
                         f"{loop.last_answer.seconds:.1f} s; started in {now - self._began:.0f} s")
            elif loop.state not in ("ready", "failed") and sentence != said:
                self.say(sentence)
            said, was = sentence, loop.state
            if loop.state == "failed":
                return
            time.sleep(READY_TICK_S if loop.state == "ready" else TICK_S)

    def _describe(self, node: Node, rung: Rung, endpoint: Endpoint) -> None:
        kernels = {choice.name: choice.value for choice in node.plan.choices}
        self._status |= {
            "model": node.model.name, "digest": node.model.digest, "tier": node.host.cpu.tier,
            "kernel": f"{kernels['kernel, one row']} / {kernels['kernel, many rows']}", "rung": rung.id,
            "threads": rung.threads, "context": rung.context, "ceiling_bytes": node.plan.ceiling_bytes,
            "fingerprint": node.plan.fingerprint, "address": endpoint.url,
            "endpoint": {"host": endpoint.host, "port": endpoint.port, "tls": endpoint.tls},
            "log": str(self.directories.state / "worker.log"), "versions": dict(node.versions),
            "cache_bytes": _folder_bytes(self.directories.cache),
        }

    def _publish_loop(self, loop: Loop, worker: worker_process.WorkerTree, now: float) -> None:
        ready_after = loop.ready_at - self._began if loop.ready_at else None
        entering = loop.state != self._status["state"]
        if loop.state == "ready" and (entering or now - self._status.get("memory_at", 0) > MEMORY_EVERY_S):
            self._status |= {"memory_bytes": _memory_bytes(worker), "memory_at": now}
        self._publish(state=loop.state, sentence=loop.sentence(now), phase=loop.phase, worker_pid=worker.pid,
                      last_answer_at=loop.last_answer_at, ready_after_s=ready_after,
                      fault=loop.fault.name if loop.fault else None)

    def _publish(self, **values: Any) -> None:
        self._status |= values
        status.write(self.directories.runtime, self._status)

    @contextlib.contextmanager
    def _only_agent(self) -> Iterator[None]:
        path = self.directories.runtime / "agent.lock"
        with disk.mapped("cannot take the service's lock", path):
            lock = open(path, "a+")  # noqa: SIM115  # closed below, after the service has ended
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise TransientError("the service is running already", why=f"pid {holder} holds {lock.name}",
                                     do="run `applianctl status`") from None
            with contextlib.suppress(OSError):  # the pid is a courtesy to whoever finds the lock taken
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), str(os.getpid()).encode())
            yield

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Inside, a signal raises KeyboardInterrupt at once; elsewhere it is noted and acted on at the next turn."""
        self._may_interrupt = not self._stop_signal
        try:
            yield
        finally:
            self._may_interrupt = False

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, _: FrameType | None) -> None:
            self._stop_signal = number
            if self._may_interrupt:
                self._may_interrupt = False
                raise KeyboardInterrupt

        before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield
        except KeyboardInterrupt:
            self._publish(state="stopped", sentence="stopped: interrupted while preparing")
            self.say("stopped: interrupted while preparing; nothing half-done is kept")
        finally:
            for number, handler in before.items():
                # After a stop only the way out is left: a second signal must not change its exit code.
                signal.signal(number, signal.SIG_IGN if self._stop_signal else handler)


def _prepare_folders(node: Node, directories: Directories) -> None:
    """Make the worker's folders; forget what earlier workers left in the temp folder, and caches of older hosts."""
    tmp = ensure(Path(node.places.tmp))
    for leftover in tmp.iterdir():
        # Inductor's precompiled header is 154 MB and slow to make: keep it.
        if not leftover.name.startswith("torchinductor_"):
            _remove(leftover)
    sockets = ensure(Path(node.places.sockets), mode=0o700)
    for leftover in sockets.iterdir():
        if leftover.is_socket():
            _remove(leftover)
    caches = sorted((path for path in directories.cache.iterdir() if _is_fingerprint(path.name)),
                    key=lambda path: path.stat().st_mtime, reverse=True)
    os.utime(node.places.cache)
    for old in [path for path in caches if path.name != node.host.fingerprint][KEPT_CACHES - 1 :]:
        _remove(old)


def _is_fingerprint(name: str) -> bool:
    return len(name) == 12 and all(c in "0123456789abcdef" for c in name)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def grown(before: int | None, now: int | None) -> int | None:
    """How much a counter grew; None where it cannot be read."""
    return None if before is None or now is None else now - before


def _memory_bytes(worker: worker_process.WorkerTree) -> int:
    """Proportional set size of the whole tree: shared pages are counted once."""
    total = 0
    for process in worker.members():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{process.pid}/smaps_rollup") as rollup:
            total += next((int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:")), 0)
    return total


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
    return total


