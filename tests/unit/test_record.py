"""The record: it lasts, it is bounded, and whatever the file or the disk does, the service goes on."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance import status
from appliance.cli.history import shown
from appliance.faults import fault
from appliance.record import FAILED, FAULTS, HISTORY, SITUATIONS, Record, load, situation
from appliance.recovery import Step
from tests.unit.test_trial import LADDER, make

NOW = 1_800_000_000.0


def crash(name: str = "crash") -> Any:
    return fault(name, what="it ended", why="of this", do="that")


def filled(state: Path) -> Record:
    record = load(state)
    record.enter("host/4.0/a", ladder=LADDER, now=NOW)
    record.note_fault(crash(), now=NOW, answered_s=3.5, candidate_id="a")
    record.take(Step(action="step-down", delay_s=1, rung="aten", sentence="down"), crash(), now=NOW)
    record.keep(make("A"), "good", now=NOW)
    record.keep(make("B"), "better", now=NOW)
    record.begin_trial(make("C"), "on trial", now=NOW)
    record.trial_started()
    record.fail_trial(make("D"), "no", now=NOW)
    record.begin_trial(make("C"), "on trial", now=NOW)
    record.trial_ready(now=NOW)
    record.say(state="stopped", sentence="stopped: by a signal", exit_code=0, now=NOW)
    return record


def test_everything_lasts(tmp_path: Path) -> None:
    record = filled(tmp_path)
    again = load(tmp_path)
    assert again == record
    assert again.rung.id == "aten"
    assert again.previous == make("A")
    assert again.trial is not None
    assert again.trial.ready_at == NOW
    assert again.last_word == {"at": NOW, "state": "stopped", "sentence": "stopped: by a signal", "exit_code": 0}
    assert again.restarts_total == {"crash": 1}
    assert again.past().tried == ("full", "aten")


def test_the_file_is_the_owners_alone_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    filled(tmp_path)
    assert stat.S_IMODE((tmp_path / "record.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize(("make", "why"), [
    (os.mkfifo, "it is no regular file"), (os.mkdir, "Is a directory"), (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
], ids=["pipe", "folder", "loop"])
def test_what_is_no_file_in_its_place_is_moved_aside_and_no_reason_to_wait(make: Any, why: str, tmp_path: Path) -> None:
    make(tmp_path / "record.json")
    assert load(tmp_path, keep=True).warning == f"{tmp_path}/record.json cannot be read: {why}"
    record = load(tmp_path)
    assert record.warning == f"{tmp_path}/record.json cannot be read: {why} and is kept as record.json.bad: rungs, trials and history begin anew"
    record.note("x", "y", now=NOW)
    assert record.problem == ""
    assert load(tmp_path).warning == ""


def test_what_cannot_be_moved_aside_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "record.json").mkdir()
    (tmp_path / "record.json.bad/kept").mkdir(parents=True)
    warning = load(tmp_path).warning
    assert warning.startswith(f"{tmp_path}/record.json cannot be read: Is a directory, and cannot be moved to record.json.bad (Directory not empty): move it away")
    assert (tmp_path / "record.json").is_dir()


@pytest.mark.parametrize("text", [
    "", "{", "[]", "null", '{"schema": 1}', '{"schema": 99}', "[" * 100_000, '{"schema": 1, "situation": 1e999}',
    b"\xff\xfe\x00".decode("latin-1"), "x" * (5 << 20),
], ids=["empty", "cut", "list", "null", "fields-missing", "other-schema", "deep", "infinite", "binary", "huge"])
def test_garbage_is_kept_aside(tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    record = load(tmp_path)
    assert "record.json.bad" in record.warning
    assert (tmp_path / "record.json.bad").read_text() == text
    record.note("x", "y", now=NOW)
    assert load(tmp_path).warning == ""


def test_any_one_damaged_value_is_noticed(tmp_path: Path) -> None:
    filled(tmp_path)
    whole = json.loads((tmp_path / "record.json").read_text())
    for key in whole:
        if key in ("situation", "rung", "good", "previous", "failed", "refused"):  # texts, derived, or unknown means none
            continue
        (tmp_path / "record.json").write_text(json.dumps({**whole, key: [{"at": "yesterday"}] if key != "last_word" else 7}))
        assert load(tmp_path).warning, key


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "fast", 10**400], ids=["nan", "infinite", "negative", "text", "huge"])
@pytest.mark.parametrize("key", ["speeds", "faults"])
def test_what_cannot_be_measured_is_damage(tmp_path: Path, key: str, value: object) -> None:
    filled(tmp_path).note_speed("a", 5.0)
    tree = json.loads((tmp_path / "record.json").read_text())
    tree[key] = {"a": value} if key == "speeds" else [{**tree[key][0], "answered_s": value}]
    (tmp_path / "record.json").write_text(json.dumps(tree))
    assert "is damaged" in load(tmp_path).warning


def test_no_state_folder_is_an_empty_record(tmp_path: Path) -> None:
    record = load(tmp_path / "not" / "there")
    assert (record.warning, record.rung.id, record.faults) == ("", "full", [])
    assert record.save() is None


def test_a_disk_that_refuses_does_not_stop_the_service(tmp_path: Path) -> None:
    record = filled(tmp_path)
    (tmp_path / "record.json").rename(tmp_path / "kept")
    (tmp_path / "record.json").mkdir()
    record.note_fault(crash("hang"), now=NOW, answered_s=1)
    assert "cannot be written" in record.problem
    assert record.past().faults[-1].name == "hang", "remembered all the same"
    (tmp_path / "record.json").rmdir()
    record.note("x", "y", now=NOW)
    assert record.problem == ""
    assert load(tmp_path).restarts_total["hang"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "record.json"]


def test_a_full_disk(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("no /dev/full here")
    record = Record(path=tmp_path / "record.json")
    (tmp_path / f".record.json.{os.getpid()}").symlink_to("/dev/full")
    record.note("x", "y", now=NOW)
    assert "No space left on device" in record.problem
    assert not list(tmp_path.iterdir())


def test_it_is_bounded(tmp_path: Path) -> None:
    record = Record(path=tmp_path / "record.json")
    for number in range(300):
        record.situation = f"s{number}"
        record.faults.append(record_fault(number))
        record.take(Step(action="step-down", delay_s=0, rung="aten", sentence="x" * 10_000), crash(), now=NOW)
        record.failed[f"id{number}"] = "r"
    record.save()
    again = load(tmp_path)
    assert (len(again.faults), len(again.history), len(again.failed), len(again.rungs)) == (FAULTS, HISTORY, FAILED, SITUATIONS)
    assert again.faults[-1].at == 299
    assert "s299" in again.rungs
    assert (tmp_path / "record.json").stat().st_size < 400_000


def record_fault(number: int) -> Any:
    from appliance.record import FaultSeen

    return FaultSeen(name="crash", at=number, rung="full", answered_s=0, situation="s", id="a", sentence="s" * 500)


def test_another_situation_begins_with_the_whole_plan_and_the_first_is_remembered(tmp_path: Path) -> None:
    record = filled(tmp_path)
    record.enter("host/8.0/a", ladder=LADDER, now=NOW)
    assert record.rung.id == "full"
    assert record.past().faults == ()
    assert "it was `aten`" in record.history[-1]["sentence"]
    record.enter("host/4.0/a", ladder=LADDER, now=NOW)
    assert record.rung.id == "aten"
    assert len(record.past().faults) == 1


def test_a_rung_that_the_plan_lost_is_forgotten(tmp_path: Path) -> None:
    record = filled(tmp_path)
    record.enter("host/4.0/a", ladder=("full", "small-batch"), now=NOW)
    assert record.rung.id == "full"
    assert "no rung of the plan any more" in record.history[-1]["sentence"]


def test_nobody_goes_back_by_hand_to_a_worker_that_is_gone(tmp_path: Path) -> None:
    python = tmp_path / "workers/1.0/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    record = Record(path=tmp_path / "record.json")
    record.keep(make("A", python=str(python)), "kept", now=1.0)
    record.keep(make("A", python=str(tmp_path / "workers/1.1/bin/python")), "kept", now=2.0)
    assert record.roll_back_refusal() is None
    python.unlink()
    assert "apt install appliance=1.0" in str(record.roll_back(now=3.0))


def test_reset_forgets_rungs_failures_and_counts_but_not_what_was_good(tmp_path: Path) -> None:
    record = filled(tmp_path)
    record.reset(now=NOW)
    again = load(tmp_path)
    assert (again.rung.id, again.failed, again.faults) == ("full", {}, [])
    assert again.good == make("B")
    assert again.restarts_total == {"crash": 1}
    assert again.history[-1]["event"] == "reset"


@pytest.mark.parametrize(("ceiling", "same"), [(4 << 30, True), ((4 << 30) - (5 << 20), True), (6 << 30, False), (None, False)])
def test_situation_knows_memory_to_a_tenth_of_a_gib(ceiling: int | None, same: bool) -> None:
    first = situation(fingerprint="f", candidate_id="c", ceiling_bytes=4 << 30)
    assert (situation(fingerprint="f", candidate_id="c", ceiling_bytes=ceiling) == first) is same


def test_case_062_the_history_shows_no_value_of_the_workers_environment(tmp_path: Path) -> None:
    record = filled(tmp_path)
    tree = record.to_json()
    for candidate in (tree["good"], tree["previous"], tree["trial"]["candidate"]):
        candidate["settings"]["worker.env"] = {"HF_TOKEN": "hf_sentinel"}
    text = json.dumps(shown(tree))
    assert "HF_TOKEN" in text
    assert "hf_sentinel" not in text


GARBAGE: tuple[Any, ...] = (None, True, -1, 1e18, 1e999, float("nan"), "x", "\x1b[2J", [], {}, [1], {"a": 1}, 10**400)


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield (*above, key)
        yield from places(value, (*above, key))


def test_garbage_anywhere_is_an_empty_record_or_one_of_the_right_types(tmp_path: Path) -> None:
    """Commands read it as well: they print times, compare codes and index rungs."""
    filled(tmp_path)
    path = tmp_path / "record.json"
    good = path.read_text()
    for place in places(json.loads(good)):
        for value in GARBAGE:
            tree = inner = json.loads(good)
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            path.write_text(json.dumps(tree))
            found = status.record(tmp_path)
            times = [one["at"] for one in (*found["faults"], *found["history"], *([found["last_word"]] if found["last_word"] else []))]
            assert all(time.localtime(at).tm_year < 10000 for at in times)
            code = (found["last_word"] or {}).get("exit_code")
            assert code is None or type(code) is int
            json.dumps(found)
