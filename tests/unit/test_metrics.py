"""The metrics text: valid Prometheus, unknown is left out, labels escaped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.board import Traffic
from appliance.metrics import TOPICS, render

SAMPLE = re.compile(r'^[a-z_]+(\{[a-z_]+="(?:[^"\\\n]|\\["\\n])*"(,[a-z_]+="(?:[^"\\\n]|\\["\\n])*")*\})? -?[0-9.e+-]+$')
FULL = {
    "version": "1.2", "model": "smol\"lm\\2\n", "digest": "ab", "tier": "avx2", "kernel": "native", "rung": "small-kv",
    "state": "busy", "ready": True, "started_at": 1.5, "last_answer_at": 2e9, "tokens_per_s": 12.25, "memory_bytes": 10,
    "probe": {"seconds": 0.1, "deadline_s": 3, "failed": 0}, "restarts_total": {"hang": 2, "oom-kill": 1},
    "trial": {"id": "x"}, "rolled_back": None, "warnings": ["a", "b"], "warned": ["reload"], "figures_given_up": "threads: 2 -> 1: slower", "max_queued": 16, "cache_bytes": None,
}


def samples(text: str) -> dict[str, str]:
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_every_line_is_valid_and_every_metric_declared_once() -> None:
    text = render(FULL, Traffic(running=3, accepted_total=7))
    assert text.endswith("\n")
    declared = re.findall(r"^# TYPE (\S+) (gauge|counter)$", text, re.MULTILINE)
    names = [name for name, _ in declared]
    assert len(names) == len(set(names))
    for line in text.splitlines():
        assert line.startswith("# ") or SAMPLE.match(line), line
        if not line.startswith("#"):
            assert re.split(r"[{ ]", line)[0] in names
    for name, kind in declared:
        assert (kind == "counter") == name.endswith("_total"), name


def test_the_figures_arrive() -> None:
    found = samples(render(FULL, Traffic(running=3, accepted_total=7)))
    assert found['appliance_state{state="busy"}'] == "1"
    assert found['appliance_state{state="ready"}'] == "0"
    assert found["appliance_ready"] == "1"
    assert found["appliance_requests_running"] == "3"
    assert found["appliance_requests_accepted_total"] == "7"
    assert found['appliance_restarts_total{fault="hang"}'] == "2"
    assert found["appliance_stepped_down"] == "1"
    assert found["appliance_on_trial"] == "1"
    assert found["appliance_rolled_back"] == "0"
    assert found["appliance_figures_given_up"] == "1"
    assert found["appliance_warnings"] == "2"
    assert [name for name, value in found.items() if name.startswith("appliance_warning{") and value == "1"] == ['appliance_warning{about="reload"}']
    assert found["appliance_tokens_per_second"] == "12.25"
    assert 'model="smol\\"lm\\\\2\\n"' in next(name for name in found if name.startswith("appliance_info"))


def test_unknown_is_left_out_and_never_zero() -> None:
    found = samples(render({"memory_bytes": None, "tokens_per_s": float("nan"), "restarts_total": 4}, Traffic()))
    assert "appliance_worker_memory_bytes" not in found
    assert "appliance_cache_bytes" not in found
    assert "appliance_tokens_per_second" not in found
    assert "appliance_stepped_down" not in found
    assert found["appliance_restarts_total"] == "4"
    assert samples(render({}, Traffic()))["appliance_ready"] == "0"


def test_every_topic_of_a_warning_is_a_label() -> None:
    supervisor = Path(__file__).parents[2] / "appliance/supervisor"
    text = "".join(path.read_text() for path in supervisor.glob("*.py"))
    used = set(re.findall(r'warn\(\s*"([a-z]+)"', text)) | set(re.findall(r'"([a-z]+)": \(?(?:life\.worn|self\.course\.|traffic\.warnings)', text))
    assert used == set(TOPICS)


ROWS_WITH_A_METRIC = {
    "rung": "appliance_stepped_down", "rolled_back": "appliance_rolled_back", "figures_given_up": "appliance_figures_given_up",
    "trial": "appliance_on_trial", "restarts_total": "appliance_restarts_total", "warnings": "appliance_warnings",
}


@pytest.mark.parametrize("key", ROWS_WITH_A_METRIC)
def test_whatever_the_status_shows_as_a_fault_moves_a_metric(key: str) -> None:
    healthy = {**FULL, "rung": "full", "rolled_back": None, "figures_given_up": None, "trial": None, "restarts_total": {}, "warnings": []}
    faulty = {**healthy, key: {"rung": "aten", "restarts_total": {"hang": 1}, "warnings": ["w"]}.get(key, "x")}
    before, after = (samples(render(status, Traffic())) for status in (healthy, faulty))
    assert [name for name in after if after[name] != before.get(name) and name.startswith(ROWS_WITH_A_METRIC[key])]
