"""PURE: what to do after a fault. `next_step(past, fault, ...) -> Step`: wait and retry, step down, roll back, or stop.

First that applies:

    fault's kind   situation                          step
    operator       any                                retry at once; the next ones in a row after 1, 2, 5, 10, ... s
    node           any                                retry after 5, 15, 60, 300, 600 s; a trial ends at the 3rd
    (any)          has a repair, first in a row       retry at once, the repair first (not on trial)
    content        another configuration was good     roll back
    content        else                               stop with the exit code
    capability     on trial, another was good         roll back
    capability     a rung may cure                    step down at once (`patience` retries first, where it has some)
    transient      on trial, another was good         retry once, roll back at the 2nd
    transient      `patience` retries used up         step down to the next rung that may cure
    transient      else                               retry after 1, 2, 5, 10, 30, 60, 60, ... s
    no rung left   another configuration was good     roll back
    no rung left   capability                         stop; but retry where it had answered for ten minutes
    no rung left   transient                          back to the rung before the walk, retry every 600 s

* "In a row": since the last ten minutes of answering in one worker's life. Those forget the counts, never the rung.
* A rung is tried once per situation. Within a list of cures the walk goes downwards only.
* `floor` is the rung that the node is known to need (memory, instruction set); rungs tried because nobody knew why are
  left again when none of them helped.
* No clock but `now`, no I/O. How long a worker had answered is measured, never computed from wall clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from appliance.faults import MEANINGS, Fault, Repair

Action = Literal["retry", "step-down", "roll-back", "stop"]

HEALTHY_S = 600.0
"""A worker that answered for so long was healthy: what came before does not count any more."""
FORGOTTEN_S = 6 * 3600.0
"""Faults older than this do not count: whatever it was, it is another day."""
RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
OPERATOR_S = (0.0, *RETRY_S)
NODE_S = (5.0, 15.0, 60.0, 300.0, 600.0)
LAST_RETRY_S = 600.0
"""Nothing is left to try, and an unattended node must come back when the cause goes away."""
TRIAL_FAULTS = 2
TRIAL_NODE_FAULTS = 3


@dataclass(frozen=True, kw_only=True)
class Happened:
    """One fault of the past. `at`: wall clock; `answered_s`: how long that worker had answered before it."""

    name: str
    at: float
    rung: str
    answered_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Past:
    """What has happened in this situation, oldest first; the last one is the fault that is asked about. `tried`: the
    rungs that have served or failed here, the present one included."""

    faults: tuple[Happened, ...]
    rung: str = "full"
    floor: str = "full"
    tried: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """`rung`: the one to start next; `repair`: what to check and make again before that; `sentence`: for the log and
    for `status`."""

    action: Action
    delay_s: float
    rung: str
    sentence: str
    repair: Repair = ""


def next_step(past: Past, fault: Fault, *, now: float, ladder: Sequence[str], on_trial: bool,
              good_available: bool) -> Step:
    """Decide. `ladder`: ids of the plan's rungs; `good_available`: another configuration is known to have been good."""
    row = in_a_row(past.faults, now=now)
    own = [one for one in row if one.name not in OUTSIDE]
    same = [one for one in row if one.name == fault.name]
    rung = past.rung
    if fault.kind == "operator":
        return _retry(fault, _at(OPERATOR_S, len(same)), rung, len(same))
    if fault.kind == "node":
        if on_trial and good_available and len(same) >= TRIAL_NODE_FAULTS:
            return _roll_back(fault, rung)
        return _retry(fault, _at(NODE_S, len(same)), rung, len(same))
    if on_trial and good_available:
        if fault.kind == "transient" and len(own) < TRIAL_FAULTS:
            return _retry(fault, _at(RETRY_S, len(own)), rung, len(same))
        return _roll_back(fault, rung)
    if fault.repair and len(same) <= 1:
        return Step(action="retry", delay_s=0.0, rung=rung, repair=fault.repair,
                    sentence=f"{fault.sentence}; checking the {NAMES[fault.repair]} and starting again")
    if fault.kind == "content":
        return _roll_back(fault, rung) if good_available else _stop(fault, rung)
    here = [one for one in same if one.rung == rung]
    if len(here) <= fault.patience:
        return _retry(fault, _at(RETRY_S, len(own)), rung, len(same))
    if not fault.cures:
        return _retry(fault, _at(RETRY_S, len(own)), rung, len(same))
    if lower := next_rung(past, fault, ladder):
        return Step(action="step-down", delay_s=0.0 if fault.patience == 0 else RETRY_S[0], rung=lower,
                    sentence=f"{fault.sentence}; stepping down to `{lower}`")
    if good_available:
        return _roll_back(fault, rung)
    if fault.kind == "capability":
        if row and row[-1].answered_s >= HEALTHY_S:
            return _retry(fault, RETRY_S[0], rung, len(same))
        return _stop(fault, rung)
    return Step(action="retry", delay_s=LAST_RETRY_S, rung=past.floor,
                sentence=f"{fault.sentence}; no rung of the plan has helped, trying again every "
                         f"{LAST_RETRY_S / 60:.0f} minutes")


OUTSIDE = frozenset(name for name, meaning in MEANINGS.items() if meaning.kind in ("operator", "node"))
"""Not the worker's doing: these do not count against it."""
NAMES = {"cache": "compile cache", "weights": "stored weights"}


def in_a_row(faults: Sequence[Happened], *, now: float) -> list[Happened]:
    """The latest faults that no healthy time and no long pause separates, oldest first."""
    row: list[Happened] = []
    for one in reversed(faults):
        if now - one.at > FORGOTTEN_S:
            break
        row.append(one)
        if one.answered_s >= HEALTHY_S:  # it begins a new row: before it all was well
            break
    row.reverse()
    return row


def next_rung(past: Past, fault: Fault, ladder: Sequence[str]) -> str | None:
    """The next rung of the plan that may cure this fault and was not tried yet; None when there is none."""
    cures = fault.cures[fault.cures.index(past.rung) + 1 :] if past.rung in fault.cures else fault.cures
    tried = {past.rung, *past.tried}
    return next((rung for rung in cures if rung in ladder and rung not in tried), None)


def _at(delays: Sequence[float], count: int) -> float:
    return delays[min(max(count, 1), len(delays)) - 1]


def _retry(fault: Fault, delay_s: float, rung: str, count: int) -> Step:
    again = "starting again" + (f" in {delay_s:.0f} s" if delay_s else "")
    many = f" ({count} times in a row)" if count > 1 else ""
    return Step(action="retry", delay_s=delay_s, rung=rung, sentence=f"{fault.sentence}; {again}{many}")


def _roll_back(fault: Fault, rung: str) -> Step:
    return Step(action="roll-back", delay_s=0.0, rung=rung,
                sentence=f"{fault.sentence}; going back to the last good configuration")


def _stop(fault: Fault, rung: str) -> Step:
    return Step(action="stop", delay_s=0.0, rung=rung, sentence=fault.exception().line)
