"""The faults table: evidence in; name, exit code, kind and one sentence out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance import errors
from appliance.faults import MEANINGS, REFUSED, RULES, VERDICTS, Evidence, classify, of_error

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parents[1] / "faults" / "cases.yaml").read_text())


def evidence(case: dict[str, Any]) -> Evidence:
    return Evidence(
        status=case["status"], phase=case.get("phase", "serving"), log=tuple(case.get("log", ())),
        oom_kills=case.get("oom_kills", 0), answered=case.get("answered", False), verdict=case.get("verdict", ""))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_fault(case: dict[str, Any]) -> None:
    fault = classify(evidence(case))
    error = fault.exception()
    assert (fault.name, error.exit_code) == (case["fault"], case["exit"])
    assert fault.kind == case.get("kind", fault.kind)
    assert list(fault.cures) == case.get("cures", list(fault.cures))
    assert fault.repair == case.get("repair", fault.repair)
    assert "\n" not in error.line
    assert len(error.line) > 20
    assert error.line.startswith(fault.sentence)


def test_every_meaning_is_the_outcome_of_a_case() -> None:
    assert set(MEANINGS) - {case["fault"] for case in CASES} == set()


def test_rules_and_verdicts_use_known_names() -> None:
    assert {name for _, name, _, _ in RULES} | set(VERDICTS) <= set(MEANINGS)


def test_the_document_has_every_fault() -> None:
    text = (Path(__file__).parents[2] / "docs" / "recovery.md").read_text()
    names = {*MEANINGS, *(name for name, _ in REFUSED.values()), "refused-by-worker", "preparing-failed"} - {"stopped"}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_every_cure_is_a_rung() -> None:
    rungs = {"one-engine", "aten", "no-compile", "small-kv", "short-context", "small-batch", "lower-isa"}
    assert {cure for meaning in MEANINGS.values() for cure in meaning.cures} == rungs


def test_the_phase_is_in_the_sentence() -> None:
    assert "while loading weights" in classify(Evidence(status=-11, phase="loading weights")).exception().line


def test_the_last_exception_is_quoted() -> None:
    log = ("(EngineCore pid=1) ERROR 11-29 14:00:00 [core.py:1] ValueError: the head count 9 is odd",
           "RuntimeError: Engine core initialization failed. See root cause above.")
    assert "ValueError: the head count 9 is odd" in classify(Evidence(status=1, phase="", log=log)).exception().line


def test_an_engine_that_was_killed_is_said_so() -> None:
    log = ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",)
    assert "ended without a word" in classify(Evidence(status=1, phase="weights loaded", log=log)).exception().line


def test_the_verdicts_own_sentence_is_used() -> None:
    fault = classify(Evidence(status=-9, phase="serving", verdict="hang", reason="no token for 31 s"))
    assert "no token for 31 s" in fault.sentence


@pytest.mark.parametrize(("error", "name", "kind"), [
    (errors.ModelError("x"), "model-refused", "content"),
    (errors.StoreError("x"), "store", "node"),
    (errors.TransientError("x"), "preparing-failed", "transient"),
    (errors.DoesNotFit("x"), "does-not-fit", "content"),
    (errors.CpuNotSupported("x"), "cpu-not-supported", "content"),
    (errors.ConfigError("x", why="y", do="z"), "configuration", "content"),
    (errors.ApplianceError("x"), "preparing-failed", "transient"),
])
def test_a_refused_step_is_a_fault_too(error: errors.ApplianceError, name: str, kind: str) -> None:
    fault = of_error(error)
    assert (fault.name, fault.kind, fault.cures) == (name, kind, ())
    assert fault.exception().line == error.line
    assert fault.exception().exit_code == error.exit_code
