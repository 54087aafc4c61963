"""The faults table: evidence in, name, exit code and one sentence out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.recovery import Evidence, classify

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parents[1] / "faults" / "cases.yaml").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_fault(case: dict[str, Any]) -> None:
    fault = classify(Evidence(status=case["status"], phase=case.get("phase", "serving"), log=tuple(case.get("log", ())),
                              oom_kills=case.get("oom_kills", 0)))
    error = fault.exception()
    assert (fault.name, error.exit_code) == (case["fault"], case["exit"])
    assert "\n" not in error.line
    assert len(error.line) > 20


def test_the_phase_is_in_the_sentence() -> None:
    assert "while loading weights" in classify(Evidence(status=-11, phase="loading weights")).exception().line


def test_the_last_exception_is_quoted() -> None:
    log = ("(EngineCore pid=1) ERROR 11-29 14:00:00 [core.py:1] ValueError: the head count 9 is odd",
           "RuntimeError: Engine core initialization failed. See root cause above.")
    assert "ValueError: the head count 9 is odd" in classify(Evidence(status=1, phase="", log=log)).exception().line


def test_an_engine_that_was_killed_is_said_so() -> None:
    log = ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",)
    assert "ended without a word" in classify(Evidence(status=1, phase="weights loaded", log=log)).exception().line
