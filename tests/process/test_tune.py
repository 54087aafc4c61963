"""`applianctl tune` with a measuring child that misbehaves: whatever happens to a trial, it is a result."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance import measured
from appliance.directories import Directories
from appliance.errors import TransientError
from appliance.measured import BANDWIDTH, CANARY, SERVED, WEIGHTS, Record, Trial
from appliance.settings import Parsed, Settings
from appliance.tune import archive, first, quiet
from appliance.tune.child import Bench
from appliance.tune.session import Session
from appliance.tune.subject import Subject, read_subject
from tests.process.conftest import Agent

TRIAL = Trial(kind=WEIGHTS, settings={}, figures={}, model="m")
ORDER = {"gauge": "weights", "threads": [1, 2], "rows": [1, 256], "kernel": "native", "variants": [""], "routes": ["own"]}


@pytest.fixture(autouse=True)
def _no_matter_what_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share their machine; what others use is a case of its own."""
    monkeypatch.setattr(quiet, "DISTURBED", 2.0)


@pytest.fixture
def node(agent: Agent) -> Agent:
    """An agent's home whose worker's Python also plays the measuring child."""
    script = Path(agent.python)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_gauge.py")} {agent.home} "$@"\n')
    return agent


def behave(agent: Agent, **behaviour: Any) -> None:
    (agent.home / "gauge.json").write_text(json.dumps(behaviour))


def orders(agent: Agent) -> list[dict[str, Any]]:
    file = agent.home / "orders.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def bench(agent: Agent, **changes: Any) -> Bench:
    return Bench(**{"worker_python": agent.python, "env": os.environ, "cpus": (0,), "runtime": agent.runtime, "silence_s": 20.0, **changes})


def trials(agent: Agent, order: dict[str, Any] = ORDER, trial: Trial = TRIAL, **changes: Any) -> list[Trial]:
    found: list[Trial] = []
    bench(agent, **changes).run(order, trial, gather=found.append, now=5.0)
    return found


def directories(agent: Agent) -> Directories:
    return Directories(store=agent.home / "store", state=agent.home / "state", cache=agent.home / "cache", runtime=agent.runtime)


def subject(agent: Agent) -> Subject:
    return read_subject(Parsed(settings=Settings(), warnings=(), sources={}), directories(agent), agent.python,
                        env={"FAKE_KERNELS": "aten"}, model_name="tiny")


def session(agent: Agent, **changes: Any) -> Session:
    what = subject(agent)
    plain = Session(subject=what, bench=bench(agent), state=agent.home / "state", full=False, budget_s=60, say=lambda _: None,
                    record=archive.current(agent.home / "state", what.host), env=os.environ, patience_s=0.5)
    return dataclasses.replace(plain, **changes)


def kept(agent: Agent) -> Record:
    record = archive.load(agent.home / "state", subject(agent).host)
    assert record is not None
    assert not record.stale
    return record


# ---- one child -------------------------------------------------------------------------------------------------------


def test_a_child_that_ends_well(node: Agent) -> None:
    behave(node, figures={"weights": {"1": 50.0, "2": 33.0}})
    one, two = trials(node)
    assert (one.settings["threads"], one.median("tok/s"), one.median("prompt tok/s")) == (1, 50.0, 50.0)
    assert (two.settings["threads"], two.figures["tok/s"].repeats, two.at) == (2, 3, 5.0)


ENDS = [("sigill", "SIGILL: unsafe here"), ("oom", "memory ran out"), ("kill", "memory ran out"), ("error", "the canary found wrong results: int4, 2 rows"),
        ("raise", "the job failed with exit code 1: RuntimeError: no such luck")]


@pytest.mark.parametrize(("mode", "failure"), ENDS)
def test_a_child_that_dies_is_a_result_and_its_earlier_figures_stay(node: Agent, mode: str, failure: str) -> None:
    behave(node, then=mode, after=2)
    one, two = trials(node)
    assert (one.settings["threads"], one.failure, one.median("tok/s")) == (1, "", 10.0)
    assert (two.settings["threads"], two.failure, dict(two.figures)) == (2, failure, {})


def test_a_child_that_says_nothing(node: Agent) -> None:
    behave(node, then="hang")
    began = time.monotonic()
    (only,) = trials(node, silence_s=1.0)
    assert only.failure == "it said nothing for 1 s"
    assert time.monotonic() - began < 15


@pytest.mark.skipif(os.geteuid() != 0 or not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="needs a control group of its own")
def test_a_child_that_the_kernel_kills_for_memory(node: Agent) -> None:
    """A real one: a control group with less memory than the child takes. The worker's own Python measures."""
    worker = Path(__file__).parents[2] / ".venv-worker/bin/python"
    if not worker.exists():
        pytest.skip("needs the worker's environment")
    group = Path(f"/sys/fs/cgroup/memory/appliance-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(400 << 20))
        script = node.home / "confined"
        script.write_text(f'#!/bin/sh\necho $$ >{group}/cgroup.procs\nexec {worker} "$@"\n')
        script.chmod(0o755)
        order = {"gauge": "bandwidth", "threads": [1], "mib": 1024, "budget_s": 0.1}
        (only,) = trials(node, order, Trial(kind=BANDWIDTH, settings={}, figures={}), worker_python=str(script), silence_s=120.0)
        assert only.failure == "memory ran out"
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def test_what_was_measured_beside_others_decides_nothing(node: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "DISTURBED", 0.2)
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cpus]
    try:
        behave(node, sleep_s=0.2)
        found = trials(node, cpus=cpus)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert all(one.notes["disturbed"] > 0.2 for one in found)
    assert all(one.median("tok/s") == 0 and one.figures for one in found)


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_is_kept_and_the_plan_goes_by_it(node: Agent) -> None:
    behave(node, figures={"weights": {"1": 50.0, "2": 33.0}})
    record = session(node).run()
    assert kept(node) == record
    assert record.open_since == 0
    assert [trial.median("GB/s") for trial in record.of(BANDWIDTH)] == [10.0] * len(record.of(BANDWIDTH))
    plan = json.loads(node.run("plan", "--model", "tiny", "--json").stdout)
    threads = next(choice for choice in plan["choices"] if choice["name"] == "threads")
    served = record.of(SERVED, record.of(WEIGHTS, subject(node).model.digest)[0].model)
    assert served or len(record.of(WEIGHTS, subject(node).model.digest)) > 1
    assert threads["evidence"].startswith("measured: 1 thread ") or len(os.sched_getaffinity(0)) == 1


def test_a_whole_worker_is_started_asked_and_ended(node: Agent) -> None:
    record = session(node).run()
    workers = [trial for trial in record.trials if trial.kind == SERVED]
    assert workers
    assert all(not trial.failure and trial.median("tok/s") > 0 and trial.median("4 streams tok/s") > 0 for trial in workers)
    assert not [process for process in node.worker_processes() if process.pid != os.getpid()]
    assert not list(Path("/tmp").glob("appl-tune-*/worker.sock"))


def test_a_canary_that_dies_keeps_the_safety_rule(node: Agent) -> None:
    behave(node, then="sigill", only="canary", after=2)
    record = session(node).run()
    (canary,) = record.of(CANARY)
    assert canary.failure == "SIGILL: unsafe here"
    assert not measured.canary_passed(record)
    assert all(order["routes"] == ["own"] for order in orders(node) if order["gauge"] == "weights")
    plan = json.loads(node.run("plan", "--model", "tiny", "--json").stdout)
    assert plan["rungs"][0]["quantization"]["dequant_threshold"] == 2


def test_an_interrupted_run_is_taken_up_where_it_stopped(node: Agent) -> None:
    behave(node, sleep_s=0.3)
    process = subprocess.Popen([sys.executable, "-m", "appliance.cli.main", "tune", "--model", "tiny"], env=node.env(), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(orders(node)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "are kept" in said
    before = kept(node)
    assert before.open_since > 0
    assert before.of(BANDWIDTH)
    if not any(trial.notes for trial in before.trials):  # what was disturbed is measured again
        (node.home / "orders.jsonl").unlink()
        behave(node)
        assert session(node).run().open_since == 0
        assert "bandwidth" not in [order["gauge"] for order in orders(node)]


def test_the_time_is_kept_and_what_was_left_out_is_named(node: Agent) -> None:
    behave(node, sleep_s=0.5)
    run = session(node, budget_s=2.0)
    began = time.monotonic()
    run.run()
    assert time.monotonic() - began < 20
    assert any("the time is up" in what for what in run.left_out)


def test_two_runs_at_once_are_refused(node: Agent) -> None:
    with archive.only_one(node.home / "state"):
        done = node.run("tune", "--model", "tiny")
    assert (done.returncode, "another `applianctl tune`" in done.stderr) == (75, True)


# ---- beside a service ------------------------------------------------------------------------------------------------


def in_flight(agent: Agent) -> Callable[[], None]:
    """A request that runs until the returned function is called."""
    agent.control("crawl", "stay")
    thread = threading.Thread(target=lambda: agent.complete(max_tokens=4000, timeout=60), daemon=True)
    thread.start()
    agent.until(lambda status: bool(status.get("running")))

    def end() -> None:
        (agent.home / "control" / "crawl").unlink(missing_ok=True)
        thread.join(timeout=60)

    return end


def test_a_service_with_requests_is_not_disturbed(node: Agent) -> None:
    node.serve()
    node.ready()
    (node.home / "orders.jsonl").unlink(missing_ok=True)
    end = in_flight(node)
    try:
        with pytest.raises(TransientError, match="this is no time to measure: 1 requests are being answered"):
            session(node).run()
        assert orders(node) == []
    finally:
        end()


def test_a_trial_is_given_up_when_a_request_comes_and_made_again(node: Agent) -> None:
    node.serve()
    node.ready()
    (node.home / "orders.jsonl").unlink(missing_ok=True)
    behave(node, sleep_s=0.5)
    said: list[str] = []
    run = session(node, patience_s=60.0, budget_s=30.0, say=lambda event: said.append(str(event.get("phase"))))
    worker = threading.Thread(target=run.run)
    worker.start()
    while not orders(node):
        time.sleep(0.02)
    end = in_flight(node)
    time.sleep(1.5)
    waiting = len(orders(node))
    time.sleep(1.0)
    assert len(orders(node)) == waiting  # nothing is measured while it is answered
    end()
    worker.join(timeout=60)
    assert not worker.is_alive()
    assert "waiting" in said
    assert orders(node)[0] == orders(node)[1]


@pytest.mark.parametrize("mode", ["sigill", "oom"])
def test_a_trial_that_dies_leaves_the_service_untouched(node: Agent, mode: str) -> None:
    node.serve()
    before = node.ready()
    behave(node, then=mode, after=1)
    record = session(node, patience_s=20.0).run()
    assert any(trial.failure for trial in record.trials)
    after = node.status()
    assert (after["state"], after["worker_pid"], after["restarts"]) == ("ready", before["worker_pid"], before["restarts"])
    assert node.complete().status == 200


# ---- the first start -------------------------------------------------------------------------------------------------


def test_the_first_start_measures_once(node: Agent) -> None:
    behave(node, figures={"weights": {"1": 50.0, "2": 33.0}})
    digest = subject(node).model.digest

    def measure() -> str:
        return first.measure(Parsed(settings=Settings(), warnings=(), sources={}), directories(node), node.python, env={"FAKE_KERNELS": "aten"},
                             model_name="tiny", digest=digest, on_event=lambda _: None)

    assert "were measured in" in measure()
    assert orders(node)[0]["gauge"] == "bandwidth"
    count = len(orders(node))
    assert measure() == ""
    assert len(orders(node)) == count
    assert kept(node).of(WEIGHTS, digest)


@pytest.mark.parametrize("mode", ["sigill", "raise"])
def test_a_first_start_that_cannot_measure_starts_all_the_same(node: Agent, mode: str) -> None:
    behave(node, then=mode)
    node.serve()
    assert node.ready()["state"] == "ready"
    assert "nothing was measured" in (node.home / "state" / "agent.log").read_text()
