"""The engines' processes: forked from the API server after the imports, told later what to run.

vLLM spawns its engine: a new Python that imports everything once more (8 s of CPU, 420 MiB) and shares nothing. Here
the process is forked while the worker is still one thread without sockets, event loop or OpenMP pool, and waits;
vLLM's process manager gets it through `EngineContext`, which looks like a multiprocessing context, and the call it
wants to run goes through a pipe, together with the environment that vLLM has changed meanwhile. Several engines (vLLM's
data parallelism) are as many processes, each confined to its own CPUs from its first moment, so that threads, and the
memory that vLLM binds to the node of the first CPU, are where the plan wants them.

Rules: fork before anything runs in parallel (`fork` does not carry OpenMP's threads over); the child holds none of the
parent's sockets, because none exist yet, and no pipe of another child; it dies with its parent (the kernel sends
SIGKILL), so an engine never outlives a killed API server; when the pipe closes without a call it ends quietly.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
CLOSE_BEFORE_JOIN = 10
"""Finalizers of this priority run before multiprocessing joins its children at exit."""

Call = tuple[str, Callable[..., None], Mapping[str, Any], Mapping[str, str]]
"""Process name, function, arguments, environment."""


class EngineProcess:
    """One forked process that waits for its call. Has what vLLM asks of a multiprocessing process.

    `start` is vLLM's: it hands over the call. Everything else is the real process's.
    """

    def __init__(self, process: BaseProcess, calls: Connection) -> None:
        self._process = process
        self._calls = calls
        self._call: tuple[str, Callable[..., None], Mapping[str, Any]] | None = None
        self._said = False

    def assign(self, name: str, target: Callable[..., None], kwargs: Mapping[str, Any]) -> None:
        self._process.name = name
        self._call = name, target, kwargs

    def start(self) -> None:
        """Send the assigned call to the waiting process. A process that has died meanwhile is seen by its sentinel."""
        assert self._call is not None, "no call was assigned"
        with contextlib.suppress(BrokenPipeError):
            self._calls.send((*self._call, dict(os.environ)))
        self._calls.close()

    @property
    def exitcode(self) -> int | None:
        """The real process's. vLLM asks when the engine has ended and keeps the answer to itself, ending with status 0;
        the log gets it here, because the agent names the fault by its signal."""
        code = self._process.exitcode
        if code and not self._said:
            self._said = True
            print(f"Engine process {self._process.name} ended (exit code: {code})", flush=True)
        return code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


class EngineContext:
    """vLLM's multiprocessing context, except that its first processes are those that wait already, in their order."""

    def __init__(self, waiting: Sequence[EngineProcess], otherwise: BaseContext) -> None:
        self._waiting = list(waiting)
        self._otherwise = otherwise

    def Process(self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]) -> Any:
        if not self._waiting:
            return self._otherwise.Process(target=target, name=name, kwargs=kwargs)  # type: ignore[attr-defined]
        process = self._waiting.pop(0)
        process.assign(name, target, kwargs)
        return process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._otherwise, name)


def fork_engines(cpus: Sequence[Collection[int]] = ()) -> tuple[EngineProcess, ...]:
    """Fork the processes that will be the engines. Call it once, after the imports and before anything else.

    `cpus`: of each engine, for several; empty: one engine, on the CPUs of this process. None are forked when this
    process has threads already, which a fork would not carry over: vLLM then spawns its engines."""
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return ()
    # Objects made so far are left alone by the collector in all processes: touching them would copy their pages.
    gc.collect()
    gc.freeze()
    ours: list[Connection] = []
    return tuple(_fork(ours, confined) for confined in cpus or [()])


def _fork(ours: list[Connection], cpus: Collection[int]) -> EngineProcess:
    """One more waiting process. `ours`: this process's ends of the pipes so far; the new one is added."""
    theirs, own = multiprocessing.Pipe(duplex=False)
    ours.append(own)
    process = multiprocessing.get_context("fork").Process(target=_wait, args=(theirs, tuple(ours), os.getpid(), cpus),
                                                          name="engine")
    process.start()
    theirs.close()
    # Whatever ends the parent before the call is sent: the child must see the end of the pipe, not be waited for.
    util.Finalize(None, own.close, exitpriority=CLOSE_BEFORE_JOIN)
    return EngineProcess(process, own)


def _wait(calls: Connection, parents_ends: Sequence[Connection], parent: int, cpus: Collection[int]) -> None:
    for end in parents_ends:
        end.close()
    die_with(parent)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        call: Call = calls.recv()
    except EOFError:
        return
    calls.close()
    gc.enable()  # forked while the imports kept it off
    name, target, kwargs, env = call
    multiprocessing.current_process().name = name  # vLLM's log lines carry it
    # Only what differs: replacing the whole environment moves it, and the process could not be given a title.
    for variable in os.environ.keys() - env.keys():
        del os.environ[variable]
    os.environ.update({variable: value for variable, value in env.items() if os.environ.get(variable) != value})
    target(**kwargs)


def die_with(parent: int) -> None:
    """Let the kernel SIGKILL this process when its parent ends; end at once when that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
