"""The steps table: what happened and the fault in; what to do next out. And whole walks: none is endless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.faults import EVERY, MEANINGS, Fault, fault
from appliance.record import Record
from appliance.recovery import HEALTHY_S, LAST_RETRY_S, Happened, Past, Step, next_step

STEPS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parents[1] / "faults" / "steps.yaml").read_text())
LADDER = ("full", "aten", "no-compile", "small-kv", "short-context", "small-batch", "lower-isa")
NOW = 1_800_000_000.0


def named(name: str) -> Fault:
    return fault(name, what="the worker ended", why="of this", do="do that")


def step_of(case: dict[str, Any]) -> Step:
    past = tuple(Happened(name=name, at=NOW - minutes * 60, rung=rung, answered_s=answered)
                 for name, minutes, rung, answered in case["past"])
    known = Past(faults=past, rung=case.get("rung", "full") if "rung_after" in case else past[-1].rung,
                 floor=case.get("floor", "full"), tried=tuple(case.get("tried", ())))
    return next_step(known, named(past[-1].name), now=NOW, ladder=tuple(case.get("ladder", LADDER)),
                     on_trial=case.get("on_trial", False), good_available=case.get("good", False))


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case["id"])
def test_step(case: dict[str, Any]) -> None:
    step = step_of(case)
    assert step.action == case["action"], step.sentence
    assert step.delay_s == case.get("delay", step.delay_s)
    assert step.rung == case.get("rung_after", case.get("rung", step.rung))
    assert step.repair == case.get("repair", step.repair)
    assert case.get("says", "") in step.sentence
    assert "\n" not in step.sentence
    assert "of this" in step.sentence, "the cause belongs into the sentence"
    if "exit" in case:
        assert named(case["past"][-1][0]).error.exit_code == case["exit"]


def test_every_fault_has_a_step() -> None:
    assert set(MEANINGS) - {case["past"][-1][0] for case in STEPS} - {"stopped", "out-of-memory", "plugin-missing"} == set()


def walk(tmp_path: Path, name: str, *, ladder: tuple[str, ...] = LADDER, healthy_on: str = "", steps: int = 60) -> list[Step]:
    """A node on which every rung but `healthy_on` ends in this fault: what the agent does, up to its end."""
    record, now, taken = Record(path=tmp_path / "record.json"), NOW, []
    record.enter("here", ladder=ladder, now=now)
    for _ in range(steps):
        if record.rung.id == healthy_on:
            break
        now += 30
        what = named(name)
        record.note_fault(what, now=now, answered_s=0.0)
        step = next_step(record.past(), what, now=now, ladder=ladder, on_trial=True, good_available=False)
        record.take(step, what, now=now)
        taken.append(step)
        now += step.delay_s
        if step.action in ("stop", "roll-back"):
            break
    return taken


@pytest.mark.parametrize("name", sorted(MEANINGS))
@pytest.mark.parametrize("ladder", [LADDER, ("full",), ("full", "aten", "short-context", "small-batch")], ids=len)
def test_no_fault_makes_an_endless_quick_loop(tmp_path: Path, name: str, ladder: tuple[str, ...]) -> None:
    taken = walk(tmp_path, name, ladder=ladder)
    entered = [step.rung for step in taken if step.action == "step-down"]
    assert len(entered) == len(set(entered)), "a rung is entered once"
    assert set(entered) <= set(ladder)
    if MEANINGS[name].kind in ("content", "capability"):
        assert taken[-1].action == "stop"
        assert len(taken) <= 2 + 2 * len(MEANINGS[name].cures)
    else:
        assert all(step.delay_s >= 60 for step in taken[-10:]), "in the end it waits"
        assert taken[-1].action == "retry", "and never gives up"
    if MEANINGS[name].cures and MEANINGS[name].kind == "transient":
        assert taken[-1].delay_s == LAST_RETRY_S
        assert taken[-1].rung == "full", "no rung helped: none is kept"
        assert len([step for step in taken if step.delay_s < LAST_RETRY_S]) <= 3 * (1 + len(EVERY))


@pytest.mark.parametrize(("name", "healthy_on", "most"), [
    ("unsupported-isa", "lower-isa", 1), ("unsupported-isa", "aten", 2), ("oom-kill", "small-kv", 1), ("oom-kill", "small-batch", 3),
    ("hang", "no-compile", 2), ("crash", "aten", 3), ("crash", "lower-isa", 18), ("compiler-broken", "no-compile", 1),
])
def test_the_rung_that_cures_is_found(tmp_path: Path, name: str, healthy_on: str, most: int) -> None:
    taken = walk(tmp_path, name, healthy_on=healthy_on)
    assert taken[-1].rung == healthy_on
    assert len(taken) <= most


def test_a_healthy_time_forgets_the_counts_and_not_the_rung(tmp_path: Path) -> None:
    record = Record(path=tmp_path / "record.json")
    record.enter("here", ladder=LADDER, now=NOW)
    for answered_s in (0.0, 0.0, 0.0, HEALTHY_S, 0.0):
        record.note_fault(named("crash"), now=NOW, answered_s=answered_s)
        step = next_step(record.past(), named("crash"), now=NOW, ladder=LADDER, on_trial=False, good_available=False)
        record.take(step, named("crash"), now=NOW)
    assert step.action == "retry"
    assert step.rung == record.rung.id == "aten"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(MEANINGS)), st.sampled_from([0.0, 0.0, 0.0, 5.0, HEALTHY_S])), max_size=80))
def test_whatever_happens_a_rung_is_entered_once_and_the_waits_grow(faults: list[tuple[str, float]]) -> None:
    record, now, entered, quick = Record(path=Path("/dev/null/record.json")), NOW, [], 0
    record.enter("here", ladder=LADDER, now=now)
    for name, answered_s in faults:
        what = named(name)
        record.note_fault(what, now=now, answered_s=answered_s)
        step = next_step(record.past(), what, now=now, ladder=LADDER, on_trial=False, good_available=False)
        assert step.rung in LADDER
        if step.action == "step-down":
            entered.append(step.rung)
        elif step.action == "retry" and what.kind == "transient" and step.delay_s < 60:
            quick += 1
        if answered_s >= HEALTHY_S:
            quick = 0
        assert quick <= 6 + len(MEANINGS), "only a healthy time makes the waits short again"
        record.take(step, what, now=now)
        now += step.delay_s
    assert len(entered) == len(set(entered))
    assert "full" not in entered
