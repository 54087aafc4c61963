"""What `status` shows: of a running agent, of one that ended, and of whatever an older one left."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from appliance import status
from appliance.cli import glance
from appliance.errors import NotReachable
from appliance.identity import identity
from appliance.record import load
from appliance.unit import Unit, parse

NOW = 1_700_000_000.0
FULL: dict[str, Any] = {
    "sentence": "busy: 1 of 4 running, last answer 3 s ago", "state": "busy", "ready": True, "model": "smollm2",
    "digest": "be31b103e4e2aaaa", "recipe": {"bits_per_weight": 4.5, "group_size": 32, "table_bits": 8}, "tier": "avx2",
    "kernel": "native / native", "rung": "small-kv", "rung_reason": "oom-kill: the kernel's OOM killer ended it",
    "threads": 2, "context": 8192, "memory_bytes": 1 << 30, "agent_memory_bytes": 50 << 20, "usable_bytes": 2 << 30,
    "ceiling_bytes": 3 << 30, "tokens_per_s": 23.44, "running": 1, "queued": 0, "max_running": 4, "max_queued": 16,
    "last_answer_at": NOW - 3, "probe": {"seconds": 0.21, "deadline_s": 3.0, "failed": 0}, "started_at": NOW - 7260,
    "ready_at": NOW - 7200, "ready_after_s": 60.0, "restarts_total": {"hang": 2, "oom-kill": 1},
    "restarts": [{"at": NOW - 60 * n, "fault": "hang", "sentence": f"no answer ({n})"} for n in range(9, 0, -1)],
    "trial": {"id": "ab", "until": NOW + 300, "sentence": "model smollm2 is on trial"},
    "rolled_back": "qwen failed: out of memory; smollm2 is served", "warnings": ["the certificate expires in 3 days"],
    "cache_bytes": 100 << 20, "store_bytes": 250 << 20, "versions": {"vllm": "0.32.0", "torch": "2.13.0"},
    "address": "http://127.0.0.1:8000", "log": "/x/worker.log", "managed_by": "systemd", "unit": "appliance.service",
    "version": "0.4.0",
}


def shown(current: dict[str, Any]) -> dict[str, str]:
    first, *rest = glance.render(current, now=NOW)
    return {"": first} | {line[2:16].strip(): line[16:] for line in rest}


def test_everything_an_operator_asks_is_on_one_page() -> None:
    rows = shown(FULL)
    assert rows["model"] == "smollm2 (be31b103e4e2), 4.50 bits per weight, group 32, 8-bit tables"
    assert rows["tier, kernel"] == "avx2, native / native"
    assert rows["rung"] == "small-kv: oom-kill: the kernel's OOM killer ended it"
    assert rows["memory"] == "1.00 GiB worker + 50 MiB agent of 2.00 GiB usable; ceiling 3.00 GiB (35% used)"
    assert rows["speed"] == "23.4 tokens/s now"
    assert rows["requests"] == "1 of 4 running, 0 of 16 waiting"
    assert rows["last answer"] == "3 s ago"
    assert rows["up"] == "2 h 1 min, ready for 2 h 0 min; start took 60 s"
    assert rows["restarts"] == "3 (2 x hang, 1 x oom-kill)"
    assert rows["trial"] == "model smollm2 is on trial (5 min to go)"
    assert rows["rolled back"].startswith("qwen failed")
    assert rows["disk"] == "store 250 MiB, caches 100 MiB"
    assert rows["service"] == "appliance.service, systemd"
    assert rows["version"] == "0.4.0 (vllm 0.32.0, torch 2.13.0)"
    assert rows["warning"] == "the certificate expires in 3 days"
    lines = list(glance.render(FULL, now=NOW))
    assert sum("hang: no answer" in line for line in lines) == glance.SHOWN_RESTARTS
    assert len(lines) < 32
    assert all(len(line) < 120 for line in lines)


@pytest.mark.parametrize("missing", [*FULL, "all"])
def test_a_field_that_is_missing_is_not_shown(missing: str) -> None:
    current = {"sentence": "x"} if missing == "all" else {k: v for k, v in FULL.items() if k != missing}
    for variant in (current, {**FULL, missing: None}):
        lines = list(glance.render(variant, now=NOW))
        assert not any("None" in line or "nan" in line for line in lines)


@pytest.mark.parametrize("key", [key for key in FULL if key != "sentence"])
@pytest.mark.parametrize("value", ["text", 7, [1], {"a": 1}, True, [None], -1.5])
def test_whatever_another_release_writes_is_no_crash(key: str, value: object) -> None:
    assert list(glance.render({**FULL, key: value}, now=NOW))


def test_a_workers_words_cannot_drive_the_terminal() -> None:
    assert "\x1b" not in "".join(glance.render({"sentence": "a\x1b[2Jb", "warnings": ["\x07x\ny"]}, now=NOW))


@pytest.mark.parametrize(("seconds", "text"), [(-5, "0 s"), (119.9, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h 0 min"),
                                              (172800, "2 d 0 h"), (273600, "3 d 4 h")])
def test_spans(seconds: float, text: str) -> None:
    assert glance.span(seconds) == text


def unit(**values: str) -> Unit:
    found = parse("appliance.service", "\n".join(f"{k}={v}" for k, v in {"LoadState": "loaded", "ActiveState": "inactive", **values}.items()))
    assert found is not None
    return found


@pytest.mark.parametrize(("word", "systemd", "state", "says"), [
    ({"at": NOW, "state": "failed", "sentence": "failed: listen.port has a wrong value", "exit_code": 78},
     {"ActiveState": "failed", "Result": "exit-code", "ExecMainCode": "1", "ExecMainStatus": "78"}, "failed",
     "stopped by a configuration error (exit 78): listen.port has a wrong value; fix it, then `applianctl start`"),
    ({"at": NOW, "state": "failed", "sentence": "failed: x does not fit", "exit_code": 76}, None, "failed",
     "stopped by a lack of memory (exit 76): x does not fit; fix it, then `applianctl serve`"),
    ({"at": NOW, "state": "failed", "sentence": "failed: a disk is full", "exit_code": 73}, None, "failed",
     "stopped by a fault (exit 73): a disk is full; see `applianctl doctor`, then `applianctl serve`"),
    ({"at": NOW, "state": "stopped", "sentence": "stopped: no worker process is left", "exit_code": 0}, {}, "stopped",
     "stopped: no worker process is left; run `applianctl start`"),
    ({"at": NOW, "state": "busy", "sentence": "busy: 3 running", "exit_code": None}, None, "stopped",
     "not running: the agent ended without a word; before that: busy: 3 running"),
    (None, {"ActiveState": "failed", "Result": "oom-kill"}, "stopped", "stopped: appliance.service is failed (oom-kill)"),
    ({"at": NOW, "state": "failed", "sentence": "failed: port taken", "exit_code": None},
     {"ActiveState": "activating", "SubState": "auto-restart"}, "stopped", "waiting: systemd starts the service again; last word: failed: port taken"),
])
def test_the_last_word_and_systemd_say_why_nothing_runs(word: dict[str, Any] | None, systemd: dict[str, str] | None, state: str, says: str) -> None:
    found = status.without_agent(word, None if systemd is None else unit(**systemd))
    assert found is not None
    assert found["sentence"].startswith(says)
    assert (found["state"], found["ready"]) == (state, False)
    assert list(glance.render(found, now=NOW))


def test_nothing_known_is_nothing() -> None:
    assert status.without_agent(None, None) is None


def test_the_last_word_is_in_the_record_else_in_the_dead_agents_status(tmp_path: Path) -> None:
    state, runtime = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    runtime.mkdir()
    assert status.last_word(state, runtime) is None
    status.write(runtime, {"agent": {"pid": 1}, "state": "failed", "sentence": "failed: y", "exit_code": 75})
    assert (status.last_word(state, runtime) or {})["exit_code"] == 75
    load(state).say(state="stopped", sentence="stopped: z", exit_code=0, now=1)
    assert (status.last_word(state, runtime) or {})["sentence"] == "stopped: z"
    (state / "record.json").write_text("[[[")
    assert (status.last_word(state, runtime) or {})["sentence"] == "failed: y"


def test_the_status_is_believed_while_its_agent_lives_and_readable_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        status.write(tmp_path, {"agent": identity(), "state": "ready", "sentence": "ready"})
    finally:
        os.umask(before)
    assert (tmp_path / "status.json").stat().st_mode & 0o777 == 0o644
    assert status.read(tmp_path)["sentence"] == "ready"
    status.write(tmp_path, {"agent": {**identity(), "ticks": 1}, "state": "ready", "sentence": "ready"})
    with pytest.raises(NotReachable):
        status.read(tmp_path)
    assert status.current(tmp_path) is None


@pytest.mark.parametrize(("age_s", "state"), [(0, "ready"), (9, "ready"), (-5, "ready"), (11, "stuck"), (86400, "stuck")])
def test_an_agent_that_stands_still_is_not_believed(age_s: float, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = status._since_boot()
    monkeypatch.setattr(status, "_since_boot", lambda: now - age_s)
    status.write(tmp_path, {"agent": identity(), "state": "ready", "sentence": "ready: x", "ready": True, "live": True})
    monkeypatch.undo()
    found = status.read(tmp_path)
    assert (found["state"], found["ready"], found["live"]) == (state, state == "ready", state == "ready")
    if state == "stuck":
        assert found["sentence"] == f"stuck: the agent has not turned for {age_s} s"
        assert status.news(found) == "stuck"


def test_an_older_agent_which_does_not_say_when_it_turned_is_believed(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"agent": identity(), "state": "ready", "sentence": "ready: x"}))
    assert status.is_ready(status.read(tmp_path))
