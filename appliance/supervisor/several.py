"""Several engines in one worker, watched one by one: a healthy one must not speak for one that hangs.

A probe asks all engines at once, each by its number (vLLM takes it as a header; the front door passes none on). While
engines owe an answer their own counters and their own CPU time are what the verdict goes by, not those of the others.
Rule: answers to users say nothing about an engine that gives none, so each is probed again and again, however many
answers users get.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from appliance.supervisor.background import Background
from appliance.supervisor.health import Answer, Busy

LOOK_S = 0.02
Reply = Answer | Busy | str


class EngineWatch:
    """`cpu_seconds`: CPU time of each engine by its number, as far as it is known. Probes run in a thread of their own;
    all else in the loop's."""

    def __init__(self, count: int, cpu_seconds: Callable[[], Mapping[int, float]]) -> None:
        self._count = count
        self._cpu_seconds = cpu_seconds
        self._owing: frozenset[int] = frozenset()
        self._cpu: dict[int, float] = {}
        self._ran: dict[int, float] = {}
        self._marks: dict[int, tuple[float, ...]] = {}
        self._moved: dict[int, float] = {}

    def ask(self, answer: Callable[[int], Reply], pause: Callable[[float], None]) -> Reply:
        """Ask all at once: the slowest answer, or the word of the first one that gave none."""
        self._owing = frozenset(range(self._count))
        asked = {engine: Background(lambda engine=engine: answer(engine), name=f"probe-{engine}")  # type: ignore[misc]
                 for engine in sorted(self._owing)}
        while not all(one.done for one in asked.values()):
            pause(LOOK_S)
            self._owing = frozenset(engine for engine, one in asked.items()
                                    if not (one.done and isinstance(one.result, Answer)))
        answers = {engine: one.result or "the probe ended without a word" for engine, one in asked.items()}
        self._owing = frozenset(engine for engine, given in answers.items() if not isinstance(given, Answer))
        for engine, given in answers.items():
            if isinstance(given, str):
                return f"engine {engine}: {given}"
        return next((given for given in answers.values() if isinstance(given, Busy)), None) or max(
            (given for given in answers.values() if isinstance(given, Answer)), key=lambda given: given.seconds)

    def look(self, now: float, *, least: float) -> None:
        """Who took CPU time since the last look, more than `least` seconds of it."""
        found = dict(self._cpu_seconds())
        for engine, spent in found.items():
            if abs(spent - self._cpu.get(engine, -1.0)) > least:
                self._ran[engine] = now
        self._cpu = found

    def compare(self, marks: Mapping[int, tuple[float, ...]], *, at: float) -> None:
        """Whose counters moved since the last time; it counts as having happened at `at`."""
        for engine, seen in marks.items():
            if seen != self._marks.get(engine):
                self._moved[engine] = max(at, self._moved.get(engine, 0.0))
        self._marks = dict(marks)

    def signs(self, moved: float, ran: float) -> tuple[float, float]:
        """When an engine that owes an answer last moved, and ran: of the stillest of them; of all (what is given) where
        none owes one."""
        owing = self._owing
        if not owing:
            return moved, ran
        return (min(self._moved.get(engine, 0.0) for engine in owing),
                min(self._ran.get(engine, ran) for engine in owing))
