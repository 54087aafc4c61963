"""Well, busy or hung: the rules as data, and the deadlines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.vitals import Signs, deadline_s, fresh_s, load_stalled, verdict

CASES = yaml.safe_load((Path(__file__).parents[1] / "vitals" / "cases.yaml").read_text())
NOW = 10_000.0


def ago(case: dict[str, Any], key: str, default: float | None) -> float | None:
    age = case.get(key, default)
    return None if age is None else NOW - age


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_verdict(case: dict[str, Any]) -> None:
    moved, cpu = ago(case, "moved", 0), ago(case, "cpu", 0)
    assert moved is not None
    assert cpu is not None
    found = verdict(Signs(
        now=NOW, probe_s=15, answered=ago(case, "answered", None), probe_began=ago(case, "probe", None),
        probe_deadline_s=case.get("deadline", 5), probe_failures=case.get("failures", 0),
        probe_failure=case.get("failure", ""), moved=moved, cpu_moved=cpu, held=NOW - case.get("held", 1e9),
        heard=NOW - case.get("heard", 0)))
    assert found.word == case["word"], found
    assert case.get("says", "") in found.sentence


@pytest.mark.parametrize(
    ("measured", "probe_s", "deadline"),
    [((), 15, 300), ((0.02, 0.03), 15, 5), ((0.02,), 0.5, 0.5), ((0.6, 0.1), 15, 12), ((10.0,), 15, 60)],
)
def test_the_deadline_follows_measured_speed(measured: tuple[float, ...], probe_s: float, deadline: float) -> None:
    assert deadline_s(measured, probe_s=probe_s) == pytest.approx(deadline)
    assert fresh_s(probe_s, deadline) == 4 * probe_s + deadline


@pytest.mark.parametrize(
    ("silent", "idle", "says"),
    [(10, 10, None), (170, 170, None), (181, 181, "no line in its log and no CPU time"), (600, 1, None), (901, 1, "no line in its log for")],
)
def test_a_stalled_load(silent: float, idle: float, says: str | None) -> None:
    found = load_stalled(now=NOW, began=NOW - 5000, spoke=NOW - silent, cpu_moved=NOW - idle)
    assert (found is None) == (says is None)
    assert says is None or says in str(found)
