"""The agent's loop: observe -> decide -> act, one tick = one sentence.

    starting -> loading -> answering -> ready -> stopping -> stopped
                   any of them, when the worker ends -> failed

The sentence of a tick is the log line, the `status` and the test's oracle. `ready` is said only after the worker
generated two tokens. This loop serves in the foreground; retries, fallbacks and systemd notifications sit on top of it
without changing it: they read its state and its fault.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from appliance.recovery import Evidence, Fault, classify
from appliance.supervisor.health import Answer, Busy

FIRST_TIMEOUT_S = 300.0
LATER_TIMEOUT_S = 60.0

PHASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (r"Started server process|Application startup complete", "opening the API"),
        (r"Warming up model for the compilation", "compiling and warming up"),
        (r"Warming up done|init engine \(profile", "warmed up"),
        (r"Loading weights took", "weights loaded"),
        (r"Initializing a V1 LLM engine|Loading safetensors|Starting to load model", "loading weights"),
        (r"vLLM API server version|non-default args", "importing the engine"),
        (r"int4 kernels agree with the reference", "kernels checked"),
    )
)
"""A line of the worker's log -> the phase it announces."""


class Worker(Protocol):
    """What the loop needs of a worker; `supervisor.worker.WorkerTree` and the tests' fakes have it."""

    @property
    def pid(self) -> int: ...
    def status(self) -> int | None: ...
    def new_log_lines(self) -> list[str]: ...


@dataclass(kw_only=True)
class Loop:
    """State of one worker's life. `listening` and `answer` do the I/O of the two health depths.

    `probe_every_s`: how old the last answer may grow before the next probe; `probe_fails`: failed probes in a row
    that make a ready worker `answering` again.
    """

    worker: Worker
    listening: Callable[[], bool]
    answer: Callable[[float], Answer | Busy | str]
    oom_kills: Callable[[], int | None]
    probe_every_s: float = 60.0
    probe_fails: int = 3
    failed_probes: int = 0
    state: str = "starting"
    phase: str = "starting the worker"
    ready_at: float | None = None
    last_answer_at: float | None = None
    last_answer: Answer | None = None
    last_refusal: str = ""
    fault: Fault | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=200))

    def tick(self, now: float) -> str:
        """Look once, move at most one state, return the sentence."""
        self._read_log()
        status = self.worker.status()
        if status is not None and self.state not in ("stopping", "stopped", "failed"):
            self._read_log()
            self.fault = classify(
                Evidence(status=status, phase=self.phase, log=tuple(self.tail), oom_kills=self.oom_kills()))
            self.state = "failed"
        elif self.state == "starting":
            self.state = "loading"
        elif self.state == "loading" and self.listening():
            self.phase = "waiting for the first answer"
            self.state = "answering"
        elif self.state == "answering" or (self.state == "ready" and self._probe_is_due(now)):
            self._probe(now)
        return self.sentence(now)

    def sentence(self, now: float) -> str:
        if self.state == "ready" and self.last_answer_at is not None:
            return f"ready: answered {_ago(now - self.last_answer_at)}"
        if self.state == "failed" and self.fault is not None:
            return f"failed: {self.fault.exception().line}"
        if self.state == "answering" and self.last_refusal:
            return f"answering: {self.last_refusal}"
        return f"{self.state}: {self.phase}"

    def stopping(self) -> None:
        self.phase = "finishing running requests"
        self.state = "stopping"

    def stopped(self) -> None:
        self.phase = "the worker has ended"
        self.state = "stopped"

    def _probe(self, now: float) -> None:
        # Unknown speed at first; once it has answered, a minute is long for two tokens.
        result = self.answer(LATER_TIMEOUT_S if self.ready_at else FIRST_TIMEOUT_S)
        if isinstance(result, Busy):
            self.last_refusal = result.sentence  # a full queue is work, not sickness
            return
        if isinstance(result, str):
            self.last_refusal = result
            self.failed_probes += 1
            if self.state == "ready" and self.failed_probes >= self.probe_fails:
                self.state = "answering"
            return
        self.last_answer, self.last_answer_at, self.last_refusal, self.failed_probes = result, now, "", 0
        if self.state != "ready":
            self.ready_at = self.ready_at or now
            self.phase = "serving"
            self.state = "ready"

    def _probe_is_due(self, now: float) -> bool:
        # A clock that was set back must not postpone the next probe.
        return self.last_answer_at is None or not 0 <= now - self.last_answer_at < self.probe_every_s

    def _read_log(self) -> None:
        lines = self.worker.new_log_lines()
        self.tail.extend(lines)
        if self.state in ("starting", "loading"):
            for phase in _phases(lines):
                self.phase = phase



def _phases(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        for pattern, phase in PHASES:
            if pattern.search(line):
                yield phase
                break


def _ago(seconds: float) -> str:
    if seconds < 2:
        return "just now"
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"
