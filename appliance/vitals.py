"""PURE: is the worker well, busy or hung? `verdict(signs)` from what the agent saw, with a sentence.

| what is seen | verdict |
|---|---|
| the last probe was answered, or is in flight for less than `patience_s` | well |
| no answer for longer, but tokens, cache use or relayed bytes moved since, and the engine takes CPU time | busy |
| the API answers with an error `ERRORS_ALLOWED` times in a row, nothing moves | hung: only errors |
| no answer within `patience_s`, and the engine took no CPU time for as long | hung: frozen |
| no answer within `patience_s`, and its API process said nothing for API_SILENT_S | hung, whatever the engine does |
| no answer within HELD_S, nothing moves, and memory.high slowed it down meanwhile | hung: held at its memory limit |
| no answer yet, its deadline has not passed | well |
| past its deadline, only CPU time moves, for less than `STALL_S` | busy: one long step is legal |
| the same for longer | hung: turns without progress |

Progress of others is never taken for an answer: it keeps the worker alive, not ready. All times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

ERRORS_ALLOWED = 3
HELD_S = 20.0
"""Slowed down for memory and no answer for so long: waiting does not help."""
API_SILENT_S = 10.0
"""The API process tells its counters in milliseconds however busy the engine is; on a starved machine in seconds."""
STALL_S = 300.0
"""Longest legal step: vLLM's own limit for one is the same."""
FRESH_PROBES = 4
"""An answer is recent while it is younger than so many probe intervals."""
MAX_DEADLINE_S = 60.0
DEADLINE_FACTOR = 20.0
FIRST_DEADLINE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Signs:
    """`probe_began`: the probe in flight or the last one that failed, None when the last one was answered.
    `moved`: when tokens, cache use or bytes to users last moved; `cpu_moved`: when the engine last took CPU time;
    `held`: when the kernel last slowed it down for memory; `heard`: when its API process last said anything."""

    now: float
    probe_s: float
    answered: float | None
    probe_began: float | None
    probe_deadline_s: float
    probe_failures: int
    probe_failure: str
    moved: float
    cpu_moved: float
    held: float = float("-inf")
    heard: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`word`: `well`, `busy` or `hung`; `cause`: of a hung one, as `appliance.faults` calls it."""

    word: str
    sentence: str = ""
    cause: str = "hang"


def verdict(signs: Signs) -> Verdict:
    """Judge the signs; the first line of the table above that fits counts."""
    patience_s = min(signs.probe_deadline_s, signs.probe_s)
    waiting_s = 0.0 if signs.probe_began is None else signs.now - signs.probe_began
    if not signs.probe_failures and waiting_s <= patience_s:
        return Verdict(word="well")
    began = signs.now - waiting_s
    why = signs.probe_failure if signs.probe_failures else f"no answer to a probe for {waiting_s:.0f} s"
    # Tokens that moved just before it froze are no sign of life: what makes tokens takes CPU time.
    runs = signs.now - max(signs.cpu_moved, signs.moved) < patience_s
    if runs and signs.moved > began and signs.now - signs.moved < max(2 * signs.probe_s, signs.probe_deadline_s):
        return Verdict(word="busy", sentence=f"{why}, but tokens move")
    if signs.probe_failures >= ERRORS_ALLOWED:
        return Verdict(word="hung", sentence=f"{signs.probe_failures} probes failed: {why}")
    if waiting_s > patience_s and signs.now - signs.cpu_moved >= patience_s:
        return Verdict(word="hung", sentence=f"{why}, and its engine does not run")
    if waiting_s > max(patience_s, API_SILENT_S) and signs.now - max(signs.heard, began) >= API_SILENT_S:
        return Verdict(word="hung", sentence=f"{why}, and its API process says nothing at all")
    if waiting_s > HELD_S and signs.held > began:
        return Verdict(word="hung", cause="memory-stall", sentence=f"{why}; the kernel holds it at its memory limit")
    if waiting_s <= signs.probe_deadline_s:
        return Verdict(word="well")
    still_s = signs.now - max(signs.moved, began)
    if still_s > max(STALL_S, signs.probe_deadline_s):
        return Verdict(word="hung", sentence=f"{why}; it computes, but no token moved for {still_s:.0f} s")
    return Verdict(word="busy", sentence=f"{why}; one step has lasted {still_s:.0f} s so far")


def deadline_s(measured_s: tuple[float, ...], *, probe_s: float) -> float:
    """How long a probe may take, from the durations of answered ones: 20 times the slowest of them, between 5 s (or the
    probe interval, where that is shorter) and a minute. Before the first answer nothing is known: 300 s."""
    if not measured_s:
        return FIRST_DEADLINE_S
    return min(max(DEADLINE_FACTOR * max(measured_s), min(5.0, probe_s)), MAX_DEADLINE_S)


def fresh_s(probe_s: float, probe_deadline_s: float) -> float:
    """How young the last answer must be for `ready`."""
    return FRESH_PROBES * probe_s + probe_deadline_s


LOAD_SILENCE_S = 180.0
LOAD_STALL_S = 900.0


def load_stalled(*, now: float, began: float, spoke: float, cpu_moved: float) -> str | None:
    """Why a loading worker has stalled, or None: it must write a line or move a phase, or at least compute for a while.

    `spoke`: last new line of its log. A quarter of an hour without a line is too long even for a compiler.
    """
    silent_s = now - max(spoke, began)
    idle_s = now - max(cpu_moved, spoke, began)
    if idle_s > LOAD_SILENCE_S:
        return f"no line in its log and no CPU time for {idle_s:.0f} s"
    if silent_s > LOAD_STALL_S:
        return f"no line in its log for {silent_s:.0f} s"
    return None
