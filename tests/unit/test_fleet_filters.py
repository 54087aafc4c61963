"""What the fleet's playbooks decide and show: the collection's filters, and what its module reads of a node."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PLUGINS = Path(__file__).parents[2] / "ansible/plugins"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fleet_{Path(name).stem}", PLUGINS / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rollout, tables, node_module = load("filter/rollout.py"), load("filter/tables.py"), load("modules/node.py")

PACKAGES = {"appliance": "2", "appliance-worker": "2", "appliance-model-smollm2": "1"}
READY = {"state": "ready", "started_at": 1.0, "tier": "avx512", "kernel": "native / native", "last_answer_at": 940.0,
         "memory_bytes": 3 * 2**29, "ceiling_bytes": 2**32, "running": 0, "queued": 0, "trial": None, "rolled_back": None}


def node(**changes: Any) -> dict[str, Any]:
    return {"packages": PACKAGES, "version": "2", "worker_version": "2", "pushed": [], "pending_age_s": 0, "config": "c2", "model": "m", "digest": "d" * 64,
            "hardware": "h", "ready": True, "state": "ready", "sentence": "ready: serving m", "status": READY, "answer": "Paris", "refusal": "",
            "record": {}, "pending": {}, **changes}


def summary(tok_s: float | None = 50.0, **changes: Any) -> dict[str, Any]:
    return dict(rollout.summary(node(**changes), tok_s))


@pytest.mark.parametrize(("result", "sentence"), [
    ({"msg": "non-zero return code", "stderr": "applianctl: warning: x\napplianctl: broken; mend it\n"}, "broken; mend it"),
    ({"msg": "web1: port 80 is taken"}, "port 80 is taken"),
    ({"msg": "One or more items failed", "results": [{"item": 1}, {"failed": True, "msg": "the second"}]}, "the second"),
    ({"msg": "Task failed: Action failed: web1: applianctl: no space"}, "no space"),
    ({"msg": "Failed to connect to the host via ssh: ssh: connect to host 10.0.0.1 port 22: No route to host", "unreachable": True},
     "Failed to connect to the host via ssh: ssh: connect to host 10.0.0.1 port 22: No route to host"),
    ({"msg": "Task failed: Module failed", "stdout": "only this\n\n"}, "only this"),
    ({"msg": "No package matching", "results": ["a text", None]}, "No package matching"),
    ({}, "failed without a word"),
])
def test_a_failure_is_one_sentence(result: dict[str, Any], sentence: str) -> None:
    assert rollout.reason(result, "web1") == sentence


def test_the_canary_is_first_and_the_others_stay_in_order() -> None:
    assert rollout.order(["a", "b", "c"]) == ["a", "b", "c"]
    assert rollout.order(["a", "b", "c"], "c", ["a"]) == ["c", "b"]
    assert rollout.from_here(["b", "c"], ["a", "b", "c", "d"]) == ["b", "c", "d"]
    assert rollout.from_here(["b", "c"], ["a", "b", "c", "d"], after=True) == ["d"]


@pytest.mark.parametrize(("wishes", "refused", "absent", "words"), [
    ({}, {}, (), ""),
    ({"canary": "z"}, {}, (), "rollout_canary z is none of these hosts: a, b"),
    ({"canary": "a"}, {}, ("a",), "the canary a cannot be reached"),
    ({"unreachable": "ignore"}, {}, (), "it is `fail` or `skip`"),
    ({"batch": "0"}, {}, (), "rollout_batch"),
    ({"batch": "lots"}, {}, (), "rollout_batch"),
    ({"batch": 3}, {}, (), ""),
    ({"batch": "100%"}, {}, (), ""),
    ({}, {"b": "no space"}, (), "nothing was changed, because not every node could fetch what it needs: b: no space"),
    ({}, {}, ("a", "b"), "none of these hosts can be reached: a, b"),
])
def test_what_cannot_be_rolled_out_is_refused_before_anything_changes(wishes: dict[str, Any], refused: dict[str, str], absent: tuple[str, ...],
                                                                     words: str) -> None:
    found = rollout.rollout_refusal(["a", "b"], {"canary": "", "batch": "25%", "unreachable": "fail", **wishes}, refused, absent)
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize(("before", "canary", "whose"), [
    (summary(), summary(60.0), "the canary's"),
    (summary(), summary(60.0, hardware="other"), "its own before"),
    (summary(), summary(60.0, digest="e" * 64), "its own before"),
    (summary(), summary(60.0, config="c1"), "its own before"),  # settings of its own, slower on purpose and always so
    (summary(config="c1"), summary(60.0, config="c1"), "the canary's"),  # settings that it gets now, and the canary has not
    (summary(None), summary(60.0, config="c1"), "the canary's"),
    (summary(packages={}), {}, "its own before"),
    (summary(config="c1"), {}, "nothing"),  # another configuration may be slower on purpose
    (summary(digest="e" * 64), {}, "nothing"),
    (summary(None), {}, "nothing"),
    (summary(None), summary(None), "nothing"),
])
def test_a_speed_is_compared_with_what_can_be_compared(before: dict[str, Any], canary: dict[str, Any], whose: str) -> None:
    assert rollout.reference(node(), before, canary)["whose"] == whose


def test_a_slower_node_is_refused_with_both_figures() -> None:
    against = {"decode_tok_s": 50.0, "whose": "the canary's"}
    assert rollout.speed_refusal(45.0, against, 10) == ""
    assert rollout.speed_refusal(44.0, against, "10") == "too slow: 44.0 tok/s, the canary's were 50.0: 12 % less, 10 % are allowed"
    assert rollout.speed_refusal(0.1, {"decode_tok_s": 0.0, "whose": "nothing"}, 10) == ""


@pytest.mark.parametrize(("changes", "version", "words"), [
    ({}, "2", ""),
    ({"ready": False, "sentence": "loading: weights"}, "", "does not answer: loading: weights"),
    ({"status": {**READY, "rolled_back": "it died"}}, "", "went back by itself: it died"),
    ({"refusal": "answered 'x', without 'Paris'"}, "", "answered 'x', without 'Paris'"),
    ({}, "3", "has version 2, not 3"),
])
def test_health(changes: dict[str, Any], version: str, words: str) -> None:
    assert rollout.health_refusal(node(**changes), version) == words


def test_a_stored_speed_counts_only_for_exactly_this_node() -> None:
    assert rollout.stored_tok_s(node(record={"now": summary(50.0)})) == 50.0
    for change in ({"config": "c1"}, {"digest": "e" * 64}, {"hardware": "other"}, {"packages": {"appliance": "1"}}):
        assert rollout.stored_tok_s(node(record={"now": summary(50.0, **change)})) is None
    assert rollout.stored_tok_s(node()) is None


def test_a_lost_node_is_a_problem_of_its_batch() -> None:
    assert rollout.problems(["a", "b", "c"], {"b": "too slow"}, ["a", "b"]) == ["b: too slow", f"c: {rollout.LOST}"]
    assert rollout.problems(["a"], {}, ["a"]) == []
    said = rollout.stopped(["b: too slow"], ["a", "b"], {"c": "no answer"}, [], False)
    assert said == "rollout stopped at a batch: b: too slow. as before and well: a, b. NOT as before: c: no answer. untouched: none"
    said = rollout.stopped(["b: too slow"], ["b"], {}, ["c"], False, ["a"])
    assert said == "rollout stopped at a batch: b: too slow. as before and well: b. passed and stay: a. untouched: c"


def test_the_way_back() -> None:
    before = summary(packages={"appliance": "1", "appliance-worker": "1", "appliance-model-smollm2": "1"})
    assert rollout.rollback_target(node()) == {}
    assert rollout.rollback_target(node(record={"before": before})) == before
    assert rollout.rollback_target(node(record={"before": summary()}, pending=before)) == before  # an interrupted run
    assert rollout.rollback_target(node(), "1")["packages"] == before["packages"]
    assert rollout.rollback_target(node(packages={}), "1") == {}
    assert rollout.apt_words(node(), before["packages"]) == ["appliance=1", "appliance-worker=1"]
    pushed = ["/var/cache/x/appliance-worker_1_amd64.deb", "/var/cache/x/appliance_1_all.deb", "/var/cache/x/appliance_11_all.deb"]
    assert rollout.apt_words(node(pushed=pushed), before["packages"]) == [pushed[1], pushed[0]]
    assert rollout.apt_words(node(), PACKAGES) == []


def test_only_what_the_role_has_installed_is_taken_off() -> None:
    with_another = {**PACKAGES, "appliance-model-other": "1"}
    assert rollout.added_packages(node(packages=with_another), {}) == list(rollout.OURS)
    assert rollout.added_packages(node(packages=with_another), {"appliance": "1", "appliance-worker": "1"}) == ["appliance-model-smollm2"]
    assert rollout.restore_refusal(node(packages=with_another), summary()) == ""


def test_an_old_note_is_no_way_back_without_a_word() -> None:
    noted = {"pending": summary(packages={"appliance": "1"})}
    assert rollout.note_refusal(node(), 3600) == ""
    assert rollout.note_refusal(node(**noted, pending_age_s=3600), "3600") == ""
    assert rollout.note_refusal(node(**noted, pending_age_s=7201), 3600).startswith("a rollout that was interrupted 2 h ago has left a note")


@pytest.mark.parametrize(("changes", "words"), [
    ({}, ""),
    ({"packages": {"appliance": "1"}}, "has the packages appliance 1, not"),
    ({"config": "c1"}, "has another configuration"),
    ({"digest": "e" * 64}, "has the model m (eeeeeeeeeeee), not m (dddddddddddd)"),
    ({"refusal": "no answer"}, "no answer"),
])
def test_whether_a_node_is_what_it_was(changes: dict[str, Any], words: str) -> None:
    found = rollout.restore_refusal(node(**changes), summary())
    assert found.startswith(words)
    assert bool(found) == bool(words)
    assert rollout.restore_refusal(node(ready=False), summary(ready=False)) == ""  # it did not answer before either


def test_status_rows_and_their_table() -> None:
    rows = [tables.status_row("web1", node(), "", 51.25, now=1000.0),
            tables.status_row("web2", node(ready=False, state="failed", sentence="stopped by\na fault", status={}, worker_version="1")),
            tables.status_row("web3", None, "no route to host"),
            tables.status_row("web4", node(status={**READY, "rolled_back": "it died"}))]
    lines = tables.table(rows)
    assert lines[0].split()[:2] == ["host", "state"]
    assert lines[1].split("  ")[-1] == "answered 1 min ago"
    assert "1.5 of 4.0 GiB" in lines[1]
    assert "51.2" in lines[1]
    assert "2, worker 1" in lines[2]
    assert lines[2].endswith("stopped by a fault")
    assert lines[3].split() == ["web3", "unreachable", "-", "-", "-", "-", "-", "no", "route", "to", "host"]
    assert lines[4].endswith("went back by itself: it died")
    last = lines[0].index("last answer or error")
    assert [line[last - 2:last] for line in lines] == ["  "] * len(lines)  # its columns stand under their heads
    assert " " not in {line[last] for line in lines}


def test_benchmark_rows() -> None:
    figures = json.dumps({"decode tok/s": 50.0, "prefill tok/s": 900.0, "streams": 4, "streams tok/s": 120.0, "first token alone s": 0.0251,
                          "share of roofline": 0.81})
    row = tables.bench_row("web1", node(), figures)
    assert (row["decode tok/s"], row["first token ms"], row["roofline %"], row["refused"]) == (50.0, 25.1, 81.0, "")
    assert tables.bench_refusal(node()) == ""
    assert tables.bench_refusal(node(status={**READY, "running": 2, "queued": 1})) == "busy: 3 requests are running or waiting"
    assert tables.bench_refusal(node(ready=False)) == "does not answer: ready: serving m"
    assert tables.bench_refusal(None, "no route") == "no route"
    refused = tables.bench_row("web2", node(), "", 'busy: "2", or more')
    assert refused["decode tok/s"] is None
    assert tables.bench_csv([row, refused])[1].startswith("web1,m,avx512,2,50.0,900.0,4,120.0,25.1,81.0,")
    assert tables.bench_csv([refused])[1].endswith(',"busy: ""2"", or more"')


def observed(tmp_path: Path, commands: dict[str, tuple[int, str, str]], answer: tuple[int, str] = (0, "no socket"), **asked: str) -> dict[str, Any]:
    """What the module makes of a node whose commands say this, by their first two words."""
    def run(command: list[str]) -> tuple[int, str, str]:
        return commands.get(" ".join(command[:2]), (127, "", "no such command"))

    return dict(node_module.observe(run, lambda request: answer, config=tmp_path / "appliance.yaml", folder=tmp_path,
                                    **{"prompt": "", "expect": "", **asked}))


DPKG = {"dpkg-query -W": (0, "installed appliance 2\ninstalled appliance-worker 2\nconfig-files appliance-old 1\n", "")}
MODELS = {"applianctl model": (0, json.dumps([{"name": "a", "digest": "1", "in_use": False}, {"name": "b", "digest": "2", "in_use": True}]), "")}


def test_a_node_without_the_appliance_is_a_value(tmp_path: Path) -> None:
    found = observed(tmp_path, {}, prompt="x")
    assert (found["state"], found["version"], found["packages"], found["ready"]) == ("absent", "", {}, False)
    assert found["refusal"] == "does not answer: the appliance is not installed"


def test_a_node_that_serves(tmp_path: Path) -> None:
    (tmp_path / "appliance.yaml").write_text("model: b\n")
    (tmp_path / "record.json").write_text("{}x")
    status = {"applianctl status": (0, json.dumps(READY | {"sentence": "ready: serving b", "reloaded_at": 5.0}), "")}
    found = observed(tmp_path, DPKG | MODELS | status, (200, '{"choices": [{"text": " Paris.\\n"}]}'), prompt="x", expect="Paris")
    assert (found["ready"], found["model"], found["digest"], found["answer"], found["refusal"]) == (True, "b", "2", "Paris.", "")
    assert found["packages"] == {"appliance": "2", "appliance-worker": "2"}
    assert len(found["config"]) == 64
    assert found["mark"] == "1.0 5.0"
    assert found["record"] == {}  # a damaged one is none
    wrong = observed(tmp_path, DPKG | MODELS | status, (200, '{"choices": [{"text": "Lyon"}]}'), prompt="x", expect="Paris")
    assert wrong["refusal"] == "answered 'Lyon', without 'Paris'"


@pytest.mark.parametrize(("status", "served"), [
    ({"live": True, "model": "b", "digest": "1"}, ("b", "1", "b")),  # the name has got another model since
    ({"live": True, "model": "a", "digest": "1"}, ("a", "1", "b")),  # the agent went back from another name
    ({"live": True, "model": "b", "digest": ""}, ("b", "2", "b")),
    ({"live": False, "model": "a", "digest": "1"}, ("b", "2", "b")),  # the last word of one that has ended
])
def test_a_node_is_what_it_serves_and_not_what_a_name_stands_for(tmp_path: Path, status: dict[str, Any], served: tuple[str, str, str]) -> None:
    found = observed(tmp_path, DPKG | MODELS | {"applianctl status": (0, json.dumps(READY | {"sentence": "ready"} | status), "")})
    assert (found["model"], found["digest"], found["in_use"]) == served
    assert found["models"] == {"a": "1", "b": "2"}


@pytest.mark.parametrize(("answer", "words"), [
    ((503, '{"error": "draining"}'), 'did not answer a request: HTTP 503: {"error": "draining"}'),
    ((0, "timed out"), "did not answer a request: HTTP 0: timed out"),
    ((200, '{"choices": [{"text": " "}]}'), "answered a request with no text"),
    ((200, "[]"), "did not answer a request: HTTP 200: []"),
])
def test_no_answer_is_a_sentence(tmp_path: Path, answer: tuple[int, str], words: str) -> None:
    status = {"applianctl status": (0, json.dumps(READY | {"sentence": "ready"}), "")}
    assert observed(tmp_path, DPKG | status, answer, prompt="x")["refusal"] == words


def test_a_stopped_service_says_its_last_word(tmp_path: Path) -> None:
    status = {"applianctl status": (69, "", "applianctl: warning: x\napplianctl: the service is not running\n")}
    found = observed(tmp_path, DPKG | status)
    assert (found["state"], found["sentence"]) == ("stopped", "applianctl: the service is not running")
