"""`applianctl tune` with a measuring child that misbehaves: whatever happens to a trial, it is a result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from appliance import measured
from appliance.directories import AGENT_SOCKET, Directories, sockets
from appliance.errors import TransientError
from appliance.launch import Places
from appliance.measured import BANDWIDTH, CANARY, SERVED, WEIGHTS, Record, Trial
from appliance.settings import Parsed, Settings, Worker
from appliance.tune import archive, first, quiet, served
from appliance.tune.child import Bench
from appliance.tune.quiet import TimeIsUp
from appliance.tune.requests import Target
from appliance.tune.session import Session
from appliance.tune.subject import Subject, read_subject
from tests.process.conftest import Agent

TRIAL = Trial(kind=WEIGHTS, settings={}, figures={}, model="m")
ORDER = {"gauge": "weights", "threads": [1, 2], "rows": [1, 256], "kernel": "native", "variants": [""], "routes": ["own"]}


UNDISTURBED = (sys.executable, "-c",
               "from appliance.tune import quiet; quiet.DISTURBED = 2.0; from appliance.cli.main import main; main()")
"""`applianctl`, to which what others use does not matter either."""


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
    seen: set[tuple[int, int]] = set()
    homes: list[Path] = []
    real = served.folders

    @contextlib.contextmanager
    def folders(*args: str) -> Iterator[Places]:
        with real(*args) as places:
            homes.append(Path(places.sockets))
            yield places

    def look(event: Mapping[str, Any]) -> None:
        """Called before each repeat, while the worker lives."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if homes and process.cwd().startswith(str(homes[0])):
                    seen.add((process.nice(), int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quiet, "yielding", lambda *_, **__: look)
        patch.setattr(served, "folders", folders)
        record = session(node).run()
    assert (10, 1000) in seen  # in time and in memory the service goes first
    assert {nice for nice, _ in seen} == {10}
    workers = [trial for trial in record.trials if trial.kind == SERVED]
    assert workers
    assert all(not trial.failure and trial.median("tok/s") > 0 and trial.median("4 streams tok/s") > 0 for trial in workers)
    assert not [process for process in node.worker_processes() if process.pid != os.getpid()]
    assert homes
    assert not any(home.exists() for home in homes)


def test_a_canary_that_dies_keeps_the_safety_rule(node: Agent) -> None:
    behave(node, then="sigill", only="canary", after=2)
    record = session(node).run()
    (canary,) = record.of(CANARY)
    assert canary.failure == "SIGILL: unsafe here"
    assert not measured.canary_passed(record)
    assert all("int4" not in order["routes"] for order in orders(node) if order["gauge"] == "weights")
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_no_worker(node: Agent, number: signal.Signals) -> None:
    def workers() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(node.home) in " ".join(process.cmdline()) and "serve" in process.cmdline():
                    found.append(process)
        return found

    process = subprocess.Popen([*UNDISTURBED, "tune", "--model", "tiny"], env=node.env(), text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    deadline = time.monotonic() + 60
    while not workers() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers()
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    assert not workers()


def test_the_time_is_kept_and_what_was_left_out_is_named(node: Agent) -> None:
    behave(node, sleep_s=0.5)
    said: list[Mapping[str, Any]] = []
    run = session(node, budget_s=2.0, say=said.append)
    began = time.monotonic()
    run.run()
    assert time.monotonic() - began < 20
    assert any("the time is up" in what for what in run.left_out)
    assert "below 63 s none may be measured" in said[0]["note"]  # known before anything is measured


SLOW = [  # name, a figure takes, a worker loads for, what is left out
    ("a child that takes too long", {"sleep_s": 30.0}, 0.05, "the rest of "),
    ("a worker that takes too long", {}, 300.0, "a whole worker with threads "),
]


@pytest.mark.parametrize(("behaviour", "load_s", "says"), [case[1:] for case in SLOW], ids=[case[0] for case in SLOW])
def test_what_takes_too_long_is_given_up_in_time(node: Agent, monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, Any], load_s: float, says: str) -> None:
    monkeypatch.setattr("appliance.tune.session.ENDING_S", 2.0)
    monkeypatch.setattr("appliance.tune.session.SERVED_S", 1.0)
    behave(node, **behaviour)
    what = subject(node)
    slow = dataclasses.replace(what, settings=dataclasses.replace(what.settings, worker=Worker(env={"FAKE_LOAD_S": str(load_s)})))
    run = session(node, subject=slow, budget_s=12.0, _served_s=1.0)
    began = time.monotonic()
    record = run.run()
    assert time.monotonic() - began < 13
    assert any(what.startswith(says) and "the time is up" in what for what in run.left_out), run.left_out
    assert not any(trial.failure for trial in record.trials)  # that there was no time is no word about it
    assert record.open_since == 0


def test_an_answer_is_waited_for_until_the_time_is_up(agent: Agent) -> None:
    agent.serve()
    agent.ready()
    agent.control("crawl", "stay")
    for ask in (lambda target: target.stream(8, 1000, 1), lambda target: target.together(2, 8, 1000, 1)):
        began = time.monotonic()
        with pytest.raises(TimeIsUp):
            ask(Target(socket=sockets(agent.runtime) / AGENT_SOCKET, model="default", ids=(10, 200), until=began + 1.5))
        assert time.monotonic() - began < 3


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


# ---- figures on trial ------------------------------------------------------------------------------------------------

SEVERAL = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads must be a choice")
MANY, ONE = {"1": 10.0, "2": 50.0}, {"1": 50.0, "2": 10.0}
"""Figures of the model's linears by threads: the rule of thumb is right, or one thread is faster."""


def tuned(node: Agent, *args: str) -> subprocess.CompletedProcess[str]:
    """`tune` in a time in which no whole worker is measured: the figures of its children decide."""
    return subprocess.run([*UNDISTURBED, "tune", "--model", "tiny", "--budget", "8", *args], env=node.env(), capture_output=True,
                          text=True, timeout=120, check=False)


def with_one_thread(node: Agent, behaviour: str) -> None:
    """Any worker with one thread behaves so: a variable for the fake one."""
    script = Path(node.python)
    script.write_text(script.read_text().replace("exec ", f'[ "$OMP_NUM_THREADS" = 1 ] && [ "$3" = serve ] && export {behaviour}\nexec ', 1))


def threads_of(status: Mapping[str, Any]) -> str:
    environment = Path(f"/proc/{status['worker_pid']}/environ").read_text().split("\0")
    return next(line.partition("=")[2] for line in environment if line.startswith("OMP_NUM_THREADS="))


def events(node: Agent) -> list[str]:
    record = json.loads((node.home / "state" / "record.json").read_text())
    return [line["event"] for line in record["history"]]


@pytest.fixture
def by_rule(node: Agent) -> Agent:
    """A service for which the rule of thumb was measured to be right, and whose first trial has passed."""
    behave(node, figures={"weights": MANY})
    node.settings["trial_s"] = 0.5
    assert tuned(node).returncode == 0
    node.serve()
    status = node.until(lambda status: bool(status.get("ready")) and status.get("trial") is None)
    assert (threads_of(status), status["figures"]) == ("2", {})
    return node


@SEVERAL
def test_applied_figures_are_on_trial_and_kept(by_rule: Agent) -> None:
    before = by_rule.status()
    behave(by_rule, figures={"weights": ONE})
    done = tuned(by_rule, "--apply", "--wait")
    assert (done.returncode, done.stdout.endswith("kept\n")) == (0, True), done.stdout + done.stderr
    assert "on trial: measured threads: rule of thumb -> 1" in (by_rule.home / "state" / "agent.log").read_text()
    after = by_rule.status()
    assert (threads_of(after), after["figures"], after["restarts"]) == ("1", {"threads": 1}, before["restarts"])
    assert events(by_rule) == ["trial", "kept", "trial", "kept"]
    again = tuned(by_rule, "--apply")
    assert (again.returncode, "nothing to apply" in again.stdout) == (0, True), again.stderr
    assert by_rule.status()["worker_pid"] == after["worker_pid"]


@pytest.mark.parametrize("damage", ["truncated", "folder", "pipe"])
def test_damaged_measurements_are_named_and_made_anew(node: Agent, damage: str) -> None:
    """By `tune show`, `plan` and `doctor`; by the start of a service without a word to anybody else."""
    behave(node, figures={"weights": MANY})
    assert tuned(node).returncode == 0
    (file,) = (node.home / "state/measured").glob("*.json")
    text = file.read_text()
    file.unlink()
    {"truncated": lambda: file.write_text(text[:-20]), "folder": file.mkdir, "pipe": lambda: os.mkfifo(file)}[damage]()
    shown = node.run("tune", "show", "--model", "tiny")
    assert (shown.returncode, shown.stdout) == (73, "")
    assert shown.stderr.startswith(f"applianctl: what was measured cannot be shown: {file} ")
    assert shown.stderr.endswith("; run `applianctl tune` to measure anew\n")
    plan = node.run("plan", "--model", "tiny").stdout
    assert f"measurements          damaged      {file} " in plan
    assert any(one["id"] == "measurements-damaged" for one in json.loads(node.run("doctor", "--json").stdout))
    again = tuned(node)
    assert again.returncode == 0, again.stderr
    assert node.run("tune", "show", "--model", "tiny").returncode == 0
    assert file.is_file()


def test_a_state_folder_that_cannot_be_used_is_named_before_anything_is_measured(node: Agent) -> None:
    folder = node.home / "state/measured"
    folder.mkdir()
    (folder / ".lock").mkdir()
    done = tuned(node)
    assert (done.returncode, done.stdout) == (73, "")
    assert f"cannot measure: Is a directory; look at {folder}/.lock" in done.stderr
    assert orders(node) == []


FAILURES = [("it dies", "FAKE=crash", 0.5, "crash"), ("it is slow", "FAKE_TOKEN_S=0.1", 6.0, "% slower")]


@SEVERAL
@pytest.mark.parametrize(("behaviour", "trial_s", "says"), [case[1:] for case in FAILURES], ids=[case[0] for case in FAILURES])
def test_applied_figures_that_fail_give_way_to_those_before(node: Agent, behaviour: str, trial_s: float, says: str) -> None:
    with_one_thread(node, behaviour)
    node.settings["trial_s"] = trial_s
    behave(node, figures={"weights": MANY})
    assert tuned(node).returncode == 0
    node.serve()
    node.until(lambda status: bool(status.get("ready")) and status.get("trial") is None)
    node.until(lambda _: bool(json.loads((node.home / "state" / "record.json").read_text())["speeds"]))
    behave(node, figures={"weights": ONE})
    done = tuned(node, "--apply", "--wait")
    assert (done.returncode, "rolled back" in done.stderr, says in done.stderr) == (78, True, True), done.stdout + done.stderr
    after = node.ready()
    assert (threads_of(after), after["figures"]) == ("2", {})
    assert after["rolled_back"] is None, "what is served is what is wanted"
    assert after["figures_given_up"].startswith("measured threads: rule of thumb -> 1: ")
    assert events(node) == ["trial", "kept", "trial", "rolled-back"]
    again = tuned(node, "--apply")
    assert (again.returncode, "given up before" in again.stderr) == (78, True)
    assert node.status()["worker_pid"] == after["worker_pid"]
    node.command("restart")  # nor by itself: what failed is not served, whatever is measured
    again_status = node.until(lambda status: bool(status.get("ready")) and status["worker_pid"] != after["worker_pid"])
    assert (threads_of(again_status), events(node)[4:]) == ("2", [])
    assert says in again_status["figures_given_up"]
    node.settings["max_running"] = 3  # nor with another setting, which is on trial by itself
    node.config("ok")
    node.command("reload")
    other = node.until(lambda status: bool(status.get("ready")) and status["worker_pid"] != again_status["worker_pid"] and status.get("trial") is None,
                       timeout=60)
    assert (threads_of(other), other["figures"], other["rolled_back"]) == ("2", {}, None)
    assert events(node)[4:] == ["trial", "kept"]
    node.processes[-1].terminate()  # nor after the agent's own end
    node.processes[-1].communicate(timeout=60)
    node.serve()
    last = node.ready()
    assert (threads_of(last), last["figures"], bool(last["figures_given_up"])) == ("2", {}, True)
    node.command("reset")  # the operator's word: they count like any others again
    node.until(lambda _: json.loads((node.home / "state" / "record.json").read_text())["refused"] == {})


@SEVERAL
def test_rolled_back_to_earlier_figures_and_not_to_rules(node: Agent) -> None:
    """The good configuration goes by figures itself: they are kept for it, whatever is measured later."""
    node.settings["trial_s"] = 0.5
    behave(node, figures={"weights": ONE})
    assert tuned(node).returncode == 0
    node.serve()
    good = node.until(lambda status: bool(status.get("ready")) and status.get("trial") is None)
    assert (threads_of(good), good["figures"]) == ("1", {"threads": 1})
    script = Path(node.python)
    script.write_text(script.read_text().replace("exec ", '[ "$OMP_NUM_THREADS" = 2 ] && [ "$3" = serve ] && export FAKE=crash\nexec ', 1))
    behave(node, figures={"weights": MANY})
    done = tuned(node, "--apply", "--wait")
    assert (done.returncode, "rolled back" in done.stderr) == (78, True), done.stdout + done.stderr
    assert threads_of(node.ready()) == "1"
    assert "measured: 1 thread 10.0" in node.run("plan", "--model", "tiny").stdout  # what a start would find by itself


@SEVERAL
def test_figures_that_nobody_asked_for_count_at_the_next_start_without_a_trial(by_rule: Agent) -> None:
    before = by_rule.status()
    behave(by_rule, figures={"weights": ONE})
    assert tuned(by_rule).returncode == 0
    time.sleep(1.0)
    assert by_rule.status()["worker_pid"] == before["worker_pid"]
    by_rule.command("reload")
    by_rule.command("restart")
    after = by_rule.until(lambda status: bool(status.get("ready")) and status["worker_pid"] != before["worker_pid"])
    assert (threads_of(after), after["trial"], after["figures"]) == ("1", None, {"threads": 1})
    assert events(by_rule) == ["trial", "kept", "figures"]


@SEVERAL
def test_a_trial_of_figures_goes_on_after_the_agent_was_killed(by_rule: Agent) -> None:
    by_rule.settings["trial_s"] = 4.0
    by_rule.config("ok")
    behave(by_rule, figures={"weights": ONE})
    by_rule.command("reload")
    assert tuned(by_rule, "--apply").returncode == 0
    first = by_rule.until(lambda status: bool(status.get("ready")) and bool(status.get("trial")))
    by_rule.processes[-1].kill()
    by_rule.processes[-1].communicate()
    by_rule.serve()
    after = by_rule.until(lambda status: bool(status.get("ready")) and bool(status.get("trial")) and status["worker_pid"] != first["worker_pid"])
    assert (threads_of(after), after["trial"]["since"]) == ("1", first["trial"]["since"])
    by_rule.until(lambda status: bool(status.get("ready")) and status.get("trial") is None)
    assert events(by_rule) == ["trial", "kept", "trial", "kept"]


def test_apply_without_a_service_counts_at_its_next_start(node: Agent) -> None:
    done = node.run("tune", "--model", "tiny", "--budget", "6", "--apply")
    assert (done.returncode, "counts at its next start" in done.stdout) == (0, True), done.stderr


WORKER = Path(__file__).parents[2] / ".venv-worker/bin/python"
PLANTED = """
import ctypes, mmap, sys
page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\x0f\x0b")  # ud2: no CPU has it
import torch
real, calls = torch.mv, []
def mv(*args, **named):
    calls.append(1)
    if len(calls) > 8:
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    return real(*args, **named)
torch.mv = mv
from appliance.gauge.__main__ import main
sys.exit(main(sys.argv[3:]))
"""
REAL = [("SIGILL: unsafe here", "-c \"$PLANTED\"", 8), ("memory ran out", "", 1024)]


@pytest.mark.skipif(not WORKER.exists(), reason="needs the worker's environment")
@pytest.mark.parametrize(("failure", "planted", "mib"), REAL, ids=["sigill", "oom"])
def test_a_real_child_that_dies_beside_a_service(node: Agent, failure: str, planted: str, mib: int) -> None:
    """The measuring child itself, with torch: it runs an instruction that no CPU has, or has less memory than it takes."""
    node.serve()
    before = node.ready()
    script = node.home / "measuring"
    limit = "" if planted else "ulimit -v 900000\n"
    script.write_text(f'#!/bin/sh\n{limit}exec {WORKER} {planted} "$@"\n')
    script.chmod(0o755)
    order = {"gauge": "bandwidth", "threads": [1, 2], "mib": mib, "budget_s": 0.05, "env": {"PLANTED": PLANTED}}
    found = trials(node, order, Trial(kind=BANDWIDTH, settings={}, figures={}), worker_python=str(script), silence_s=120.0)
    assert found[-1].failure == failure
    assert all(trial.figures for trial in found[:-1])
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
