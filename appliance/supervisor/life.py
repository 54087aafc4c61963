"""One life of a worker, from its start to its end: `tick(now)` looks once and moves at most one state.

    loading -> answering -> ready <-> busy
         any of them -> failed (with a fault)

`ready` only after the worker generated a token, and only while its last answer, to a probe or to a user, is recent. A
probe is one token, never more than one in flight; it is asked for when no answer was seen for a probe interval, and at
once when requests are in work and nothing moves. Nothing here waits: probes and counters run in the background.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from appliance import vitals
from appliance.board import Traffic
from appliance.faults import Evidence, Fault, classify
from appliance.patrol import Walked
from appliance.supervisor.background import Background
from appliance.supervisor.health import Answer, Busy, Counters
from appliance.supervisor.several import EngineWatch
from appliance.vitals import Signs

SAMPLE_S = 10.0
SUSPICIOUS_SAMPLE_S = 1.0
SUSPECT_S = 3.0
"""Requests in work and nothing moved for so long: ask, whatever the interval."""
HELD_GAP_S = 5.0
CPU_SHARE = 0.03
"""Less of one core than this is not computing: vLLM's idle engine takes one part in a hundred."""

PATROL_S = 30.0
"""So often one piece of the stored weights is read again while nobody asks for anything."""
LEAST_SPEED_TOKENS, SPEED_TOKENS, SPEED_TRIES = 4, 48, 3

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
    """What a life needs of a worker; `supervisor.worker.WorkerTree` has it, and fakes in tests."""

    @property
    def pid(self) -> int: ...
    def status(self) -> int | None: ...
    def new_log_lines(self) -> list[str]: ...
    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time of the whole tree, and of all but its leader (the engine)."""


@dataclass(kw_only=True)
class Life:
    """`listening`, `answer` and `counters` do the I/O, in the background. `oom_kills`, `slowed`: what the kernel did
    for memory's sake: processes killed since the start (None = unknown), and how often it was slowed down. `patrol`
    reads a piece of what is stored again; `worn`: what it found in files that this worker does not map. `engines`:
    where there are several. `now` is always monotonic seconds."""

    worker: Worker
    listening: Callable[[], bool]
    answer: Callable[[float, int], Answer | Busy | str]
    counters: Callable[[], Counters | None]
    traffic: Callable[[], Traffic]
    oom_kills: Callable[[], int | None]
    slowed: Callable[[], int]
    patrol: Callable[[], Walked]
    probe_s: float
    began: float
    engines: EngineWatch | None = None
    state: str = "loading"
    phase: str = "starting the worker"
    fault: Fault | None = None
    ready_since: float | None = None
    answered: float | None = None
    last_answer: Answer | None = None
    probe_failures: int = 0
    probe_failure: str = ""
    sentence_of_trouble: str = ""
    worn: str = ""
    tokens_per_s: float | None = None
    speed: float | None = None
    moved: float = 0.0
    measured_s: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    _probe: Background[Answer | Busy | str] | None = None
    _probe_began: float | None = None
    _probe_ended: float = 0.0
    _knock: Background[bool] | None = None
    _sample: Background[Counters | None] | None = None
    _sampled: tuple[float, Counters] | None = None
    _walk: Background[Walked] | None = None
    _walked: float = 0.0
    _spoke: float = 0.0
    _cpu: tuple[float, float] = (0.0, 0.0)
    _cpu_at: float = 0.0
    _tree_moved: float = 0.0
    _engine_moved: float = 0.0
    _held: float = float("-inf")
    _held_since: float = 0.0
    _heard: float = 0.0
    _slowed: int | None = None
    _speeds: list[float] = field(default_factory=list)
    _bytes: int = 0
    _answered_users: int = 0

    @property
    def deadline_s(self) -> float:
        return vitals.deadline_s(tuple(self.measured_s), probe_s=self.probe_s)

    @property
    def speed_within_s(self) -> float:
        """How long measuring the speed of this worker takes where nobody else asks it: probes that succeed are no
        longer than their deadline."""
        return SPEED_TRIES * (self.probe_s + self.deadline_s)

    @property
    def progress(self) -> tuple[float, float]:
        """Changes whenever a load gets on: a new line, or CPU time."""
        return self._spoke, self._tree_moved

    def answered_s(self, now: float) -> float:
        """How long it has answered without a fault; 0 while it never has."""
        return now - self.ready_since if self.ready_since is not None else 0.0

    def tick(self, now: float) -> None:
        """Look once; afterwards `state`, `phase` and `fault` are true of this moment."""
        self._read_log(now)
        status = self.worker.status()
        if self.state == "failed":
            return
        if status is not None:
            self._read_log(now)
            self._fail(status=status)
            return
        self._watch(now)
        if self.state == "loading":
            self._load(now)
        else:
            self._serve(now)

    def hang(self, verdict: str, reason: str) -> None:
        """End this life by the agent's own verdict (`faults.VERDICTS`)."""
        self._fail(status=0, verdict=verdict, reason=reason)

    def _fail(self, *, status: int, verdict: str = "", reason: str = "") -> None:
        self.fault = classify(Evidence(status=status, phase=self.phase, log=tuple(self.tail),
                                       oom_kills=self.oom_kills(), answered=self.answered is not None, verdict=verdict,
                                       reason=reason))
        self.state = "failed"

    def _load(self, now: float) -> None:
        if self._knock is None:
            self._knock = Background(self.listening, name="knock")
        elif self._knock.done:
            if self._knock.result:
                self.phase, self.state = "waiting for the first answer", "answering"
            elif now - self._knock.began > 0.5:
                self._knock = None
        stalled = vitals.load_stalled(now=now, began=self.began, spoke=self._spoke, cpu_moved=self._tree_moved)
        if stalled and self.state == "loading":
            self.hang("slow-start", stalled)
        elif self._is_held(now) and now - max(self._spoke, self.began) > vitals.HELD_S * 3:
            self.hang("memory-stall", "the kernel holds it at its memory limit")

    def _serve(self, now: float) -> None:
        self._take_probe(now)
        if self._probe is None and self._due(now):
            deadline_s = max(vitals.MAX_DEADLINE_S, self.deadline_s) * 5
            self._probe_began = now if self._probe_began is None else self._probe_began
            tokens = self._tokens()
            self._probe = Background(lambda: self.answer(deadline_s, tokens), name="probe")
        moved, ran = self.moved, self._engine_moved
        if self.engines is not None and self._probe_began is not None:
            moved, ran = self.engines.signs(moved, ran)
        found = vitals.verdict(Signs(
            now=now, probe_s=self.probe_s, answered=self.answered, probe_began=self._probe_began,
            probe_deadline_s=self.deadline_s, probe_failures=self.probe_failures, probe_failure=self.probe_failure,
            moved=moved, cpu_moved=ran, heard=self._heard,
            held=self._held if self._is_held(now) else float("-inf")))
        self.sentence_of_trouble = found.sentence
        if found.word == "hung":
            self.hang(found.cause, found.sentence)
        elif self.answered is not None:
            fresh = now - self.answered < vitals.fresh_s(self.probe_s, self.deadline_s)
            well = fresh and found.word == "well"
            if well and self.state != "ready":
                self.ready_since = self.ready_since or now
                self.phase = "serving"
            self.state = "ready" if well else "busy"
        self._go_patrol(now)

    def _go_patrol(self, now: float) -> None:
        """Read stored weights again while nobody wants the cores. A damaged layout is mapped by this worker, whose
        answers may be wrong from now on; the portable model is only needed for the next start."""
        if self._walk is not None and self._walk.done:
            found, self._walk, self._walked = self._walk.result, None, now
            if found is not None and found.layout:
                self.hang("damaged-weights", found.layout[0])
            elif found is not None and found.model:
                self.worn = (f"the stored model is damaged: {found.model[0]}; this worker does not need that file any "
                             "more, the next start does: run `applianctl model repair`; check the disk")
            return
        idle = self.state == "ready" and not self.traffic().running
        if idle and self._walk is None and now - max(self._walked, self.ready_since or now) >= PATROL_S:
            self._walk = Background(self.patrol, name="patrol")

    def _tokens(self) -> int:
        """How many tokens the next probe asks for: one, but a few probes of a new worker are longer and tell its speed,
        about a second's worth, while nobody else is there."""
        if self.state != "ready" or len(self._speeds) == SPEED_TRIES or self.traffic().running or not self.measured_s:
            return 1
        return max(LEAST_SPEED_TOKENS, min(SPEED_TOKENS, int(1 / min(self.measured_s))))

    def _is_held(self, now: float) -> bool:
        """Whether the kernel slows it down for memory again and again: a single time is ordinary reclaim."""
        return now - self._held < HELD_GAP_S and self._held - self._held_since >= vitals.HELD_S / 2

    def _due(self, now: float) -> bool:
        if self.answered is None or self.probe_failures or self.probe_failure:
            return now - self._probe_ended >= min(1.0, self.probe_s)
        if now - self.answered >= self.probe_s:
            return True
        if self.engines is not None and now - self._probe_ended >= self.probe_s:
            return True  # users were answered, but perhaps all by one of the engines
        still = now - max(self.moved, self.answered) >= min(SUSPECT_S, self.probe_s)
        return self.traffic().running > 0 and still

    def _take_probe(self, now: float) -> None:
        if self._probe is None or not self._probe.done:
            return
        result, self._probe, self._probe_ended = self._probe.result, None, now
        if isinstance(result, Answer):
            if result.tokens > 1:
                self._speeds.append(result.tokens / result.seconds)
                self.speed = max(self._speeds) if len(self._speeds) == SPEED_TRIES else None
            else:
                self.measured_s.append(result.seconds)
            self.last_answer, self.answered = result, now
            self.probe_failures, self.probe_failure, self._probe_began = 0, "", None
        elif isinstance(result, Busy) and self.traffic().running:
            self.probe_failure, self._probe_began = result.sentence, None  # a full queue is work, not sickness
        else:
            self.probe_failures += 1
            said = result.sentence if isinstance(result, Busy) else result
            self.probe_failure = said or "the probe ended without a word"

    def _watch(self, now: float) -> None:
        """Notice what moves: bytes and answers to users, the engine's counters, CPU time."""
        traffic = self.traffic()
        if traffic.chunks_total != self._bytes:
            self._bytes, self.moved, self._heard = traffic.chunks_total, now, now
        if traffic.answered_total != self._answered_users:
            self._answered_users = traffic.answered_total
            if self.answered is not None:
                self.answered = now
        if now - self._cpu_at >= 1.0:
            tree, engine = self.worker.cpu_seconds()
            least = CPU_SHARE * (now - self._cpu_at)
            self._tree_moved = now if abs(tree - self._cpu[0]) > least else self._tree_moved
            self._engine_moved = now if abs(engine - self._cpu[1]) > least else self._engine_moved
            self._cpu, self._cpu_at = (tree, engine), now
            if self.engines is not None:
                self.engines.look(now, least=least)
            slowed = self.slowed()
            if self._slowed is not None and slowed > self._slowed:
                self._held_since = now if now - self._held > HELD_GAP_S else self._held_since
                self._held = now
            self._slowed = slowed
        if self.state != "loading":
            self._take_sample(now)

    def _take_sample(self, now: float) -> None:
        if self._sample is not None and self._sample.done:
            found = self._sample.result
            if found is not None:
                self._heard = now
                self._compare(now, found)
            self._sample = None
        suspicious = self._probe is not None and now - self._probe.began > min(2.0, self.probe_s)
        every_s = SUSPICIOUS_SAMPLE_S if suspicious or self.probe_failures else SAMPLE_S
        last = self._sampled[0] if self._sampled else 0.0
        if self._sample is None and now - last >= every_s:
            self._sample = Background(self.counters, name="counters")

    def _compare(self, now: float, found: Counters) -> None:
        if self._sampled is not None:
            before, then = self._sampled
            if then.marks != found.marks:
                # Somewhere between two looks: what moved before a probe began must not speak for the time after it.
                self.moved = max(self.moved, before if now - before > 2 * SUSPICIOUS_SAMPLE_S else now)
            if self.engines is not None:
                self.engines.compare(found.engines, at=before if now - before > 2 * SUSPICIOUS_SAMPLE_S else now)
            if now > before:
                self.tokens_per_s = max(0.0, found.generated - then.generated) / (now - before)
        self._sampled = (now, found)

    def _read_log(self, now: float) -> None:
        lines = self.worker.new_log_lines()
        if lines:
            self._spoke = now
        self.tail.extend(lines)
        if self.state == "loading":
            for phase in _phases(lines):
                self.phase = phase


def _phases(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        for pattern, phase in PHASES:
            if pattern.search(line):
                yield phase
                break
