"""The doctor's judgement as data: symptoms -> exactly these findings. A healthy node has none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance import doctor, symptoms
from appliance.symptoms import AccessFacts, DoctorFacts, HostSigns, Problem, ServiceFacts, SetupFacts

DATA: dict[str, Any] = yaml.safe_load((Path(__file__).parents[1] / "doctor/cases.yaml").read_text())
CASES: list[dict[str, Any]] = DATA["cases"]
PARTS = {"service": ServiceFacts, "setup": SetupFacts, "host": HostSigns, "access": AccessFacts}
IDS = {"config", "worker", "plan", "selftest", "generation"}


def facts(parts: Any) -> DoctorFacts:
    if parts == "nothing":
        return DoctorFacts()
    built = {name: kind(**{key: value(key, given) for key, given in (DATA["healthy"][name] | parts.get(name, {})).items()})
             for name, kind in PARTS.items()}
    return DoctorFacts(**built, unseen=tuple(parts.get("unseen", ())))


def value(key: str, given: Any) -> Any:
    if isinstance(given, list):
        return tuple(given)
    return Problem(**given) if key in IDS and given else given


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_symptoms_and_findings(case: dict[str, Any]) -> None:
    found = list(doctor.findings(facts(case["parts"])))
    assert [one.id for one in found] == case["finds"]
    assert doctor.exit_code(found) == case.get("code", 0)
    for one in found:
        assert one.level in doctor.LEVELS
        assert (one.exit_code != 0) == (one.level == doctor.ERROR)
        assert one.what
    assert case.get("says", "") in " ".join(f"{one.what} {one.why} {one.do}" for one in found)


def test_every_finding_has_a_case_and_words_for_all_three_questions() -> None:
    source = Path(doctor.__file__).read_text()
    import re

    ids = set(re.findall(r'_(?:error|warn|note|of)\("([a-z-]+)"', source))
    told = {one for case in CASES for one in case["finds"]}
    assert ids == told
    for case in CASES:
        for one in doctor.findings(facts(case["parts"])):
            if one.id not in ("config-wrong", "worker-unusable", "plan-refuses", "selftest-failed", "generation-failed"):
                assert one.why, one.id
                assert one.do, one.id


def test_every_symptom_is_in_some_case() -> None:
    """A symptom that no case has could be misspelt in the rules."""
    for name, kind in PARTS.items():
        used = {key for case in CASES if isinstance(case["parts"], dict) for key in case["parts"].get(name, {})} | set(DATA["healthy"][name])
        assert {field.name for field in dataclasses.fields(kind)} == used, name
    assert symptoms.Problem(what="x").exit_code == 78
