"""Collecting symptoms: from a folder with this and that wrong in it, whoever looks."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance import checkup, doctor, settings, status
from appliance.checkup.service import is_agent
from appliance.directories import Directories, of_service
from appliance.identity import identity
from appliance.record import Record
from appliance.settings import Parsed
from appliance.symptoms import DoctorFacts

NOW = 1_700_000_000.0


@pytest.fixture
def places(tmp_path: Path) -> Directories:
    found = Directories(store=tmp_path / "store", state=tmp_path / "state", cache=tmp_path / "cache", runtime=tmp_path / "run")
    for folder in dataclasses.astuple(found):
        folder.mkdir()
    return found


def examine(places: Directories, text: str = "", env: dict[str, str] | None = None) -> DoctorFacts:
    def read() -> Parsed:
        return settings.parse("worker: {python: /nonexistent}\n" + text, origin="a.yaml")

    return checkup.examine(checkup.patient(places, read, env={"PATH": "/usr/bin:/bin", **(env or {})}, now=NOW))


def record(places: Directories, **values: Any) -> None:
    whole = Record(path=places.state).to_json() | values
    (places.state / "record.json").write_text(json.dumps(whole))


def seen(name: str, at: float) -> dict[str, Any]:
    return {"name": name, "at": at, "rung": "full", "answered_s": 1.0, "situation": "", "id": "", "sentence": ""}


def ids(facts: DoctorFacts) -> set[str]:
    return {one.id for one in doctor.findings(facts)}


def test_a_broken_configuration_is_a_symptom(places: Directories) -> None:
    facts = examine(places, "listen: {port: many}\n")
    assert facts.setup.config is not None
    assert facts.setup.config.exit_code == 78
    assert facts.access.loopback is None
    assert "config-wrong" in ids(facts)


def test_a_missing_worker_is_a_symptom_and_no_plan_is_made(places: Directories) -> None:
    facts = examine(places)
    assert facts.setup.worker is not None
    assert facts.setup.worker.what == "the worker's Python is missing"
    assert facts.setup.plan is None
    assert facts.setup.kernels is None


def test_faults_of_the_last_hour_are_counted_and_older_ones_are_not(places: Directories) -> None:
    record(places, faults=[seen("hang", NOW - age) for age in (5, 60, 3000, 3700, 86400)] + [seen("crash", NOW + 50)],
           failed={"ab": "it died"}, history=[{"at": NOW + 500, "event": "x", "sentence": "", "id": ""}])
    facts = examine(places)
    assert facts.service.faults == {"hang": 3}
    assert facts.service.failed == {"ab": "it died"}
    assert facts.host.clock_behind_s == 500
    assert {"faults-repeat", "trial-failed", "clock-behind"} <= ids(facts)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"faults": 3, "failed": [], "history": {}, "last_word": "x"}', "\0\0"])
def test_whatever_the_record_holds_it_is_no_crash(text: str, places: Directories) -> None:
    (places.state / "record.json").write_text(text)
    assert ids(examine(places))


@pytest.mark.parametrize(("mode", "found"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_that_everybody_may_read(mode: int, found: bool, places: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    key = places.state / "key"
    key.write_text("sk-x\n")
    key.chmod(mode)
    for folder in key.parents:
        if folder.stat().st_uid == os.geteuid() and str(folder) not in ("/", "/tmp"):
            folder.chmod(folder.stat().st_mode | 0o001)
    assert bool(examine(places, f"api_key_file: {key}\n").access.readable_secrets) == found


def test_keys_decide_whether_the_network_may_come(places: Directories) -> None:
    assert "open-without-key" in ids(examine(places, "listen: {host: 0.0.0.0}\n"))
    (places.state / "k").write_text("sk-x\n")
    found = ids(examine(places, f"listen: {{host: 0.0.0.0}}\napi_key_file: {places.state}/k\n"))
    assert "open-without-key" not in found
    assert "no-tls" in found
    (places.state / "keys.json").write_text("garbage")
    assert "keys-unreadable" in ids(examine(places, "listen: {host: 0.0.0.0}\n"))


def test_a_certificate_that_is_none(places: Directories) -> None:
    for name in ("c.pem", "k.pem"):
        (places.state / name).write_text("nothing\n")
    assert "tls-unusable" in ids(examine(places, f"tls: {{cert: {places.state}/c.pem, key: {places.state}/k.pem}}\n"))


def test_a_damaged_model_is_named(places: Directories) -> None:
    (places.store / "names").mkdir()
    (places.store / "names" / "gone").write_text("0" * 64 + "\n")
    facts = examine(places)
    assert any("gone" in sentence for sentence in facts.setup.damaged), facts.setup.damaged
    assert "model-damaged" in ids(facts)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file to another account")
def test_files_of_another_account(places: Directories) -> None:
    (places.state / "record.json").write_text("{}")
    os.chown(places.state / "record.json", 54321, 54321)
    assert "foreign-files" in ids(examine(places))


def test_a_running_agent_whose_socket_is_silent(places: Directories) -> None:
    status.write(places.runtime, {"agent": identity(), "state": "ready", "sentence": "ready", "ready": True, "rung": "no-compile",
                                  "rung_reason": "hang", "pids": [os.getpid(), "x"], "probe": {"failed": 1, "sentence": "late"}})
    facts = examine(places)
    assert facts.service.running
    assert facts.service.answers is False
    assert facts.host.worker_swap_bytes is not None
    assert {"agent-silent", "stepped-down", "probe-fails"} <= ids(facts)
    assert "not-running" not in ids(facts)


@pytest.mark.parametrize(("line", "yes"), [
    ("/usr/bin/python3 /usr/bin/applianctl serve", True), ("/x/.venv/bin/python /x/.venv/bin/applianctl --config a.yaml serve --port 1", True),
    ("/x/python3.11 -m appliance.cli.main serve", True), ("/x/python3.11 -P -m appliance.cli.main serve", True),
    ("sudo applianctl serve", False), ("bash -c applianctl serve", False), ("/usr/bin/python3 /usr/bin/applianctl status", False),
    ("timeout 5 python /usr/bin/applianctl serve", False), ("/x/python -m appliance.worker serve", False), ("vim serve applianctl", False),
    ("/usr/bin/python3 /opt/serve.py serve", False), ("python3", False), ("", False),
])
def test_what_is_an_agent(line: str, yes: bool) -> None:
    assert is_agent(line.split()) == yes


@pytest.mark.parametrize(("uid", "env", "mine", "there", "whose"), [
    (1000, {}, False, True, "system"), (1000, {}, True, True, "own"), (1000, {}, False, False, "own"),
    (1000, {"APPLIANCE_HOME": "/x"}, False, True, "own"), (0, {}, False, True, "own"),
], ids=["a plain user sees the service", "own agent first", "no service", "a home of its own", "root's folders are the service's"])
def test_whose_service_is_meant(uid: int, env: dict[str, str], mine: bool, there: bool, whose: str, tmp_path: Path) -> None:
    system = Directories(store=tmp_path / "s/store", state=tmp_path / "s/state", cache=tmp_path / "s/cache", runtime=tmp_path / "s/run")
    own_runtime = tmp_path / "own"
    (own_runtime / "appliance").mkdir(parents=True)
    if mine:
        (own_runtime / "appliance/status.json").write_text("{}")
    if there:
        system.runtime.mkdir(parents=True)
    found = of_service({"XDG_RUNTIME_DIR": str(own_runtime), **env}, uid=uid, home=None, system=system)
    assert (found == system) == (whose == "system")


def test_nothing_is_changed_by_looking(places: Directories, tmp_path: Path) -> None:
    record(places, faults=[])
    (places.runtime / "status.json").write_text(json.dumps({"agent": {"pid": 1}, "state": "ready", "sentence": "ready"}))
    look: Callable[[], list[tuple[str, int, int]]] = lambda: sorted(  # noqa: E731
        (str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*"))
    before = look()
    examine(places)
    assert look() == before
