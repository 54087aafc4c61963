"""`apply`, `rollback`, `history` and `reset` against a running agent: what the operator is told, and what then serves."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from appliance import manifest
from appliance.store import Store
from tests.process.conftest import Agent


class Node:
    """A running agent that reads a configuration file of its own, and commands with the same file."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.file = agent.home / "node.yaml"
        env = {"FAKE": "ok", "FAKE_CONTROL": str(agent.home / "control")}
        self.file.write_text(f"# this node\nmodel: tiny\ntrial_s: 0.5\nprobe_s: 1\ndrain_s: 1\nmemory: {{reserve: 64M}}\nworker:\n  env: {json.dumps(env)}\n")
        agent.serve("ok", APPLIANCE_CONFIG=str(self.file))
        self.kept()

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return self.agent.run(*args, APPLIANCE_CONFIG=str(self.file), timeout=120)

    def kept(self) -> dict[str, object]:
        return self.agent.until(lambda status: bool(status.get("ready")) and status.get("trial") is None)

    def broken(self, mode: str) -> str:
        return f"worker.env={json.dumps({'FAKE': mode, 'FAKE_CONTROL': str(self.agent.home / 'control')})}"


@pytest.fixture
def node(agent: Agent) -> Node:
    return Node(agent)


def test_a_change_is_followed_until_it_is_kept(node: Node) -> None:
    done = node.run("apply", "--set", "context=256", "--wait")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "context: default -> 256"
    assert "the running service takes it now; `applianctl status` shows its trial" in lines
    assert lines[-1] == "kept"
    assert node.kept()["context"] == 256
    assert node.file.read_text().startswith("# this node\n")


def test_new_contents_under_the_name_in_use_go_on_trial_when_they_are_applied(node: Node) -> None:
    """And the name alone changes nothing; back again by its digest."""
    store = Store(node.agent.home / "store")
    before, worker = store.names()["tiny"], node.agent.status()["worker_pid"]
    assert node.run("apply", "--model", "tiny").stdout == "nothing to change: this is what the settings say already\n"
    with store.begin(manifest.key("2" * 64, {})) as draft:
        shutil.copytree(store.get("tiny").path, draft.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        store.commit(draft, source="tiny", source_digest="2" * 64, recipe={}, report={}, created="2026-01-01T00:00:00", name="tiny")
    after = store.names()["tiny"]
    assert after != before
    assert node.agent.status()["worker_pid"] == worker
    done = node.run("apply", "--model", "tiny", "--wait")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"model: tiny ({before[:12]}) -> what tiny stands for now"
    assert node.kept()["digest"] == after
    assert node.run("model", "name", "tiny", before).returncode == 0
    assert node.run("apply", "--model", "tiny", "--wait").returncode == 0
    assert node.kept()["digest"] == before


def test_what_needs_no_other_worker_changes_none(node: Node) -> None:
    worker = node.agent.status()["worker_pid"]
    done = node.run("apply", "--set", "max_queued=3", "--set", "listen.port=9999", "--set", "tls.cert=/c", "--set", "tls.key=/k", "--wait")
    assert "listen.port, tls: from the next start of the agent (`systemctl restart appliance`, or a new `serve`)" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "kept"
    assert node.agent.status()["worker_pid"] == worker


def test_a_change_that_fails_is_reported_and_taken_back(node: Node) -> None:
    done = node.run("apply", "--set", node.broken("sigill"), "--wait")
    assert done.returncode == 78
    assert "rolled back: " in done.stderr
    assert "illegal instruction" in done.stderr
    assert "serving the last good configuration" in done.stderr
    assert node.agent.ready()["rolled_back"]
    again = node.run("apply", "--set", node.broken("sigill"), "--set", "max_queued=5")
    assert again.returncode == 78
    assert "given up before" in again.stderr


def test_rollback_history_and_reset(node: Node) -> None:
    assert "no earlier configuration" in node.run("rollback").stderr
    assert node.run("apply", "--set", "context=256", "--wait").returncode == 0
    assert "rolling back" in node.run("rollback").stdout
    status = node.agent.until(lambda status: bool(status.get("ready") and status.get("rolled_back")))
    assert status["context"] == 4096
    assert "rolled back by the operator" in str(status["rolled_back"])
    assert "context: 256" in node.file.read_text(), "the file is the operator's"
    events = [line[27:].split()[0] for line in node.run("history").stdout.splitlines()]
    assert events == ["trial", "kept", "trial", "kept", "rolled-back"]
    assert "a waiting service starts at once" in node.run("reset").stdout
    status = node.agent.until(lambda status: bool(status.get("ready")) and status.get("context") == 256)
    assert status["rolled_back"] is None


def test_a_configuration_that_was_broken_meanwhile_is_refused(node: Node) -> None:
    good = node.file.read_text()
    node.file.write_text(good + "context: many\n")
    done = node.run("reload")
    assert done.returncode == 0
    status = node.agent.until(lambda status: bool(status.get("warnings")))
    assert "the configuration is not taken" in str(status["warnings"])
    assert node.run("apply", "--set", "context=256").returncode == 78
    node.file.write_text(good)
    assert node.run("apply", "--set", "context=256", "--wait").returncode == 0
    assert not node.agent.status()["warnings"]


@pytest.mark.parametrize(("text", "said"), [
    ("listen: [1]", "listen has a wrong value: a list stands where keys and their values belong; write it as `listen: {host: 127.0.0.1, port: 8000}`"),
    ("memory: 5", "memory has a wrong value: a number stands where"),
    ("context: [512]", "context has a wrong value: [512] is not a whole number"),
    ("worker: {env: [HF_TOKEN=hunter2]}", "worker.env has a wrong value: what stands there (a list) is not a mapping"),
    ("- model: tiny", "is not a configuration: the top level is not"),
], ids=["section-list", "section-number", "scalar-list", "env-list", "top-list"])
def test_a_file_of_another_shape(node: Node, text: str, said: str) -> None:
    """What serves goes on after a reload; a start ends with the same sentence; no command takes it."""
    good, worker = node.file.read_text(), node.agent.status()["worker_pid"]
    node.file.write_text(text + "\n")
    assert node.run("reload").returncode == 0
    status = node.agent.until(lambda status: bool(status.get("warnings")))
    assert "the configuration is not taken: " in (warning := str(status["warnings"]))
    assert said.replace("'", "\\'") in warning or said in warning
    assert (status["worker_pid"], status["ready"]) == (worker, True)
    for command in (["config", "check"], ["apply", "--set", "max_queued=3"], ["apply", "--model", "tiny"], ["plan"]):
        done = node.run(*command)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (78, "", 1), command
        assert said in done.stderr
        assert "hunter2" not in done.stderr
    other = node.agent.home / "other"
    other.mkdir()
    ended = node.agent.run("serve", APPLIANCE_CONFIG=str(node.file), APPLIANCE_HOME=str(other))
    assert (ended.returncode, ended.stderr.count("\n")) == (78, 1)
    assert said in ended.stderr
    last = node.agent.run("status", APPLIANCE_CONFIG=str(node.file), APPLIANCE_HOME=str(other)).stdout
    assert "stopped by a configuration error (exit 78)" in last
    assert said in last
    node.file.write_text(good)
    assert node.run("reload").returncode == 0
    status = node.agent.until(lambda status: not status.get("warnings"))
    assert (status["worker_pid"], status["ready"]) == (worker, True)


def test_settings_that_name_no_model_any_more_do_not_end_a_good_one_for_a_default_that_is_not_there(agent: Agent) -> None:
    missing = {"APPLIANCE_SMOLLM2_GGUF": str(agent.home / "smollm2.gguf")}
    file, new = agent.home / "node.yaml", agent.home / "new.yaml"
    rest = json.dumps({"trial_s": 0.5, "probe_s": 1, "drain_s": 1, "memory": {"reserve": "64M"},
                       "worker": {"env": {"FAKE": "ok", "FAKE_CONTROL": str(agent.home / "control")}}})
    file.write_text(json.dumps({"model": "tiny", **json.loads(rest)}))
    new.write_text(rest)
    agent.serve("ok", "--model", "default", APPLIANCE_CONFIG=str(file), **missing)
    worker = agent.until(lambda status: bool(status.get("ready")) and status.get("trial") is None)["worker_pid"]
    before = file.read_text()
    done = agent.run("apply", str(new), APPLIANCE_CONFIG=str(file), **missing)
    assert (done.returncode, done.stdout, file.read_text()) == (65, "", before)
    assert "smollm2.gguf" in done.stderr
    file.write_text(rest)
    assert agent.run("reload", APPLIANCE_CONFIG=str(file)).returncode == 0
    status = agent.until(lambda status: bool(status.get("warnings")))
    assert "the configuration is not taken: " in str(status["warnings"])
    file.write_text(before)
    done = agent.run("apply", str(new), "--model", "tiny", "--wait", APPLIANCE_CONFIG=str(file), **missing)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "kept"), done.stderr
    status = agent.status()
    assert (status["worker_pid"], status["trial"], status["model"], status["warnings"]) == (worker, None, "tiny", [])
    assert json.loads(file.read_text()) == json.loads(rest)


def test_an_agent_that_ends_meanwhile_is_reported(agent: Agent) -> None:
    file = agent.home / "node.yaml"
    file.write_text(json.dumps({"model": "tiny", "trial_s": 600, "drain_s": 1, "worker": {"env": {"FAKE": "slow", "FAKE_CONTROL": str(agent.home / "control")}}}))
    agent.serve("ok", APPLIANCE_CONFIG=str(file))
    agent.wait_for("loading")  # nothing has answered yet, so there is nothing to go back to
    wish = f"worker.env={json.dumps({'FAKE': 'crash', 'FAKE_SAYS': 'ValueError: Unknown quantization method: cpu_int4.'})}"
    done = agent.run("apply", "--set", wish, "--set", "context=256", "--wait", APPLIANCE_CONFIG=str(file), timeout=120)
    assert done.returncode == 78, (done.stdout, done.stderr)
    assert "the service ended" in done.stderr
