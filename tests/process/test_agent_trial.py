"""A running agent and another configuration: on trial, kept, rolled back, wanted again, across a killed agent."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from appliance.client import ask
from appliance.directories import AGENT_SOCKET, sockets
from tests.process.conftest import Agent


@pytest.fixture
def kept(agent: Agent) -> Agent:
    """A running agent whose first configuration has passed its trial."""
    agent.settings["trial_s"] = 0.5
    agent.serve("ok")
    agent.until(lambda status: status.get("ready") and status.get("trial") is None)
    assert events(agent) == ["trial", "kept"]
    return agent


def events(agent: Agent) -> list[str]:
    record = json.loads((agent.home / "state" / "record.json").read_text())
    return [line["event"] for line in record["history"]]


def change(agent: Agent, **settings: Any) -> None:
    """Another configuration file, and the word to read it."""
    path = agent.home / "ok.yaml"
    tree = json.loads(path.read_text())
    for key, value in settings.items():
        tree.setdefault("worker", {}).setdefault("env", {})[key] = value
    draft = path.with_suffix(".draft")  # the agent may be reading it just now
    draft.write_text(json.dumps(tree))
    draft.replace(path)
    control(agent, "reload")


def control(agent: Agent, name: str) -> None:
    assert ask(sockets(agent.runtime) / AGENT_SOCKET, "POST", f"/control/{name}").status == 202


def test_a_configuration_that_works_is_kept(kept: Agent) -> None:
    before = kept.status()["worker_pid"]
    change(kept, FAKE="slow")
    on_trial = kept.until(lambda status: status.get("trial") is not None)
    assert "worker.env" in on_trial["trial"]["sentence"]
    after = kept.until(lambda status: status.get("ready") and status.get("trial") is None)
    assert after["worker_pid"] != before
    assert after["rolled_back"] is None
    assert events(kept) == ["trial", "kept", "trial", "kept"]


@pytest.mark.parametrize("fake", ["crash", "sigill", "hang"])
def test_one_that_fails_is_rolled_back_and_not_tried_again(kept: Agent, fake: str) -> None:
    kept.settings["probe_s"] = 1
    change(kept, FAKE=fake)
    kept.until(lambda status: status.get("rolled_back"), timeout=60)
    status = kept.ready(timeout=60)
    assert "worker.env: other value of FAKE" in str(status["rolled_back"])
    assert kept.complete().status == 200
    worker = status["worker_pid"]
    control(kept, "reload")  # the same wish again changes nothing
    change(kept, FAKE="ok")  # and the good one wanted again needs no new worker
    status = kept.until(lambda status: status.get("ready") and not status.get("rolled_back"))
    assert status["worker_pid"] == worker
    assert events(kept) == ["trial", "kept", "trial", "rolled-back"]


def test_a_failed_one_stays_failed_over_a_restart_until_it_is_reset(kept: Agent) -> None:
    change(kept, FAKE="crash")
    kept.until(lambda status: status.get("rolled_back"), timeout=60)
    kept.ready()
    first = kept.processes[-1]
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)
    assert first.returncode == 0
    path = kept.home / "ok.yaml"
    wish = path.read_text()
    kept.config = lambda fake: path  # type: ignore[method-assign]  # keep the file as it is
    assert json.loads(wish)["worker"]["env"]["FAKE"] == "crash"
    kept.serve("ok")
    status = kept.ready(timeout=60)
    assert "serving the last good configuration" in str(status["rolled_back"])
    assert "trial" not in events(kept)[4:]
    control(kept, "reset")
    kept.until(lambda status: status.get("trial") is not None, timeout=60)
    kept.until(lambda status: bool(status.get("rolled_back")) and bool(status.get("ready")), timeout=60)
    assert events(kept)[4:] == ["reset", "trial", "rolled-back"]


def test_a_trial_goes_on_after_the_agent_was_killed(agent: Agent) -> None:
    agent.settings["trial_s"] = 3
    first = agent.serve("ok")
    before = agent.until(lambda status: status.get("ready") and status["trial"])
    first.kill()
    first.communicate()
    agent.serve("ok")
    after = agent.until(lambda status: status.get("ready") and status["trial"])
    assert after["trial"]["since"] == before["trial"]["since"]
    agent.until(lambda status: status.get("ready") and not status["trial"])
    assert events(agent) == ["trial", "kept"]


def test_a_wrong_configuration_is_not_taken_and_the_service_goes_on(kept: Agent) -> None:
    worker = kept.status()["worker_pid"]
    good = (kept.home / "ok.yaml").read_text()
    (kept.home / "ok.yaml").write_text("context: many\n")
    control(kept, "reload")
    status = kept.until(lambda status: any("context has a wrong value" in text for text in status["warnings"]))
    assert (status["worker_pid"], status["ready"]) == (worker, True)
    (kept.home / "ok.yaml").write_text(good)
    control(kept, "reload")
    kept.until(lambda status: not status["warnings"])


def test_by_hand_the_trial_is_given_up(kept: Agent) -> None:
    kept.settings["trial_s"] = 600
    tree = json.loads((kept.home / "ok.yaml").read_text())
    (kept.home / "ok.yaml").write_text(json.dumps({**tree, "trial_s": 600}))
    change(kept, FAKE="slow")
    kept.until(lambda status: status.get("ready") and status["trial"])
    control(kept, "rollback")
    status = kept.until(lambda status: status.get("ready") and status.get("rolled_back"))
    assert "rolled back by the operator" in status["rolled_back"]
    assert status["trial"] is None


def test_drained_and_resumed_the_worker_stays(kept: Agent) -> None:
    worker = kept.status()["worker_pid"]
    control(kept, "drain")
    kept.until(lambda status: status["state"] == "draining")
    refused = kept.complete()
    assert (refused.status, "draining" in refused.text) == (503, True)
    assert int(refused.headers["Retry-After"]) > 0
    control(kept, "resume")
    assert kept.ready()["worker_pid"] == worker
    assert kept.complete().status == 200


def test_what_an_earlier_agent_served_is_come_back_to_before_its_trial_is_over(agent: Agent) -> None:
    """As an upgrade does it: another agent is started, and wants something else."""
    first = agent.serve("ok")
    agent.until(lambda status: status.get("ready") and status["trial"])
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)
    agent.serve("sigill")
    status = agent.until(lambda status: status.get("ready") and bool(status.get("rolled_back")), timeout=60)
    assert "illegal instruction" in status["rolled_back"]
    assert events(agent) == ["trial", "kept", "trial", "rolled-back"]


def test_what_has_answered_is_come_back_to_even_before_its_trial_is_over(agent: Agent) -> None:
    agent.serve("ok")
    agent.until(lambda status: status.get("ready") and status["trial"])
    change(agent, FAKE="sigill")
    status = agent.until(lambda status: status.get("ready") and bool(status.get("rolled_back")), timeout=60)
    assert "illegal instruction" in status["rolled_back"]
    assert events(agent) == ["trial", "kept", "trial", "rolled-back"]


def test_a_worker_that_cannot_be_started_is_not_taken(kept: Agent) -> None:
    worker = kept.status()["worker_pid"]
    (kept.home / "fake-python").chmod(0o644)
    control(kept, "reload")
    status = kept.until(lambda status: any("cannot be executed" in text for text in status["warnings"]))
    assert (status["worker_pid"], status["ready"]) == (worker, True)
