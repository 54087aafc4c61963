"""What an operator types at a running agent: status, logs, control, chat, doctor. Real agent, fake worker."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from appliance.directories import sockets
from tests.process.conftest import Agent


def test_status_shows_the_service_at_a_glance(agent: Agent) -> None:
    agent.serve()
    agent.ready()
    agent.complete()
    time.sleep(1.2)
    done = agent.run("status")
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first == "ready: serving tiny"
    rows = {line[2:16].strip(): line[16:] for line in rest}
    assert re.fullmatch(r"tiny \([0-9a-f]{12}\), .* bits per weight, group 32.*", rows["model"])
    assert re.fullmatch(r"0 of \d+ running, 0 of \d+ waiting", rows["requests"])
    assert re.fullmatch(r"\d+ s ago", rows["last answer"])
    assert rows["rung"] == "full"
    assert "None" not in done.stdout
    said = json.loads(agent.run("status", "--json").stdout)
    assert said["ready"] is True
    assert said["sentence"] == first


def test_a_restart_is_shown_with_its_cause_and_a_clean_stop_as_the_last_word(agent: Agent) -> None:
    process = agent.serve()
    agent.ready()
    os.kill(agent.worker()[0].pid, signal.SIGKILL)
    agent.until(lambda status: bool(status.get("ready")) and bool(status.get("restarts")))
    text = agent.run("status").stdout
    assert re.search(r"^  restarts      1 \(1 x killed\)$", text, re.MULTILINE), text
    assert re.search(r"^ +\d+ s ago: killed: ", text, re.MULTILINE), text
    assert agent.run("stop").returncode == 0
    assert process.wait(timeout=10) == 0
    done = agent.run("status")
    assert done.returncode == 69
    assert done.stdout.startswith("stopped: no worker process is left; run `applianctl serve`")
    assert "last word" in done.stdout
    said = json.loads(agent.run("status", "--json").stdout)
    assert (said["state"], said["ready"], said["exit_code"]) == ("stopped", False, None)


def test_a_configuration_error_is_said_after_the_end(agent: Agent) -> None:
    agent.settings["listen"] = {"host": "0.0.0.0"}
    assert agent.serve().wait(timeout=20) == 78
    done = agent.run("status")
    assert done.returncode == 69
    assert "stopped by a configuration error (exit 78)" in done.stdout
    assert "fix it, then `applianctl serve`" in done.stdout
    findings = json.loads(agent.run("doctor", "--json").stdout)
    assert {"stopped-by-fault", "open-without-key"} <= {one["id"] for one in findings}


def test_stop_restart_drain_and_resume(agent: Agent) -> None:
    process = agent.serve()
    before = agent.ready()["worker_pid"]
    restarted = agent.run("restart")
    assert restarted.returncode == 0, restarted.stderr
    assert restarted.stdout.splitlines()[-1] == "ready: serving tiny"
    assert agent.status()["worker_pid"] != before
    drained = agent.run("drain")
    assert (drained.returncode, drained.stdout.splitlines()[-1]) == (0, "drained: no request runs")
    assert agent.complete().status == 503
    assert agent.run("start").returncode == 0
    assert agent.complete().status == 200
    agent.run("drain", "--no-wait")
    agent.wait_for("draining")
    assert agent.run("drain", "--resume").stdout == "resumed: requests are let in\n"
    agent.ready()
    stopped = agent.run("stop")
    assert (stopped.returncode, stopped.stdout.splitlines()[-1]) == (0, "stopped: no agent runs")
    assert process.wait(timeout=5) == 0
    assert agent.run("stop").stdout == "not running\n"
    for command in ("restart", "drain", "reload", "start"):
        assert agent.run(command).returncode == 69


def test_stop_works_without_the_socket(agent: Agent) -> None:
    process = agent.serve()
    agent.ready()
    (sockets(agent.runtime) / "agent.sock").unlink()
    assert agent.run("stop").returncode == 0
    assert process.wait(timeout=5) == 0


def test_reload_says_where_to_look(agent: Agent) -> None:
    agent.serve()
    agent.ready()
    done = agent.run("reload")
    assert (done.returncode, done.stdout) == (0, "reload: asked for; `applianctl status` shows what came of it\n")


def test_chat_needs_no_key(agent: Agent) -> None:
    key = agent.home / "key"
    key.write_text("sk-test-0123456789\n")
    agent.settings["api_key_file"] = str(key)
    agent.serve()
    agent.ready()
    assert agent.complete().status == 401
    done = agent.run("chat", "hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr == ""


def test_chat_falls_back_to_the_address_with_one_line(agent: Agent) -> None:
    agent.serve()
    agent.ready()
    (sockets(agent.runtime) / "agent.sock").unlink()
    done = agent.run("chat", "hello")
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert f"asking http://127.0.0.1:{agent.port}" in done.stderr


def test_logs_of_agent_and_worker(agent: Agent) -> None:
    agent.serve()
    agent.ready()
    said = agent.run("logs").stdout
    assert "ready: http" in said
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", said)
    assert agent.run("logs", "-n", "1").stdout.count("\n") == 1
    assert agent.run("logs", "--since", "1h").stdout == said
    assert agent.run("logs", "--since", "2199-01-01").stdout == ""
    assert agent.run("logs", "--worker").stdout in agent.log() + "\n"
    assert agent.run("logs", "--journal").returncode == 69
    assert agent.run("logs", "--since", "soon").returncode == 2


def test_logs_follow_over_a_rotation(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    log = state / "agent.log"
    log.write_text("2026-01-01T00:00:00 one\n")
    process = subprocess.Popen([sys.executable, "-m", "appliance.cli.main", "logs", "-f"], stdout=subprocess.PIPE, text=True,
                               env={"PATH": os.environ["PATH"], "APPLIANCE_HOME": str(tmp_path)})
    assert process.stdout is not None
    assert process.stdout.readline() == "2026-01-01T00:00:00 one\n"
    time.sleep(0.6)
    with open(log, "a") as file:
        file.write("two\n")
    assert process.stdout.readline() == "two\n"
    log.rename(state / "agent.log.1")
    log.write_text("three\n")
    assert process.stdout.readline() == "three\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 0
    process.stdout.close()


def test_watch_writes_a_line_per_change_into_a_pipe_and_redraws_on_a_terminal(agent: Agent) -> None:
    agent.serve()
    agent.ready()
    piped = subprocess.Popen([sys.executable, "-m", "appliance.cli.main", "status", "--watch"], env=agent.env(), stdout=subprocess.PIPE, text=True)
    ours, theirs = pty.openpty()
    drawn = subprocess.Popen([sys.executable, "-m", "appliance.cli.main", "status", "--watch"], env=agent.env(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    time.sleep(2.5)
    agent.run("drain", "--no-wait")
    time.sleep(1.5)
    for process in (piped, drawn):
        process.send_signal(signal.SIGINT)
    lines = piped.communicate(timeout=5)[0].splitlines()
    assert (piped.returncode, drawn.wait(timeout=5)) == (0, 0)
    assert "ready: tiny" in lines[0]
    assert len(lines) == 2, lines
    assert "draining" in lines[1]
    screen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert screen.count("\x1b[2J") == 1
    assert screen.count("\x1b[H") >= 3


def test_doctor_finds_nothing_on_a_healthy_node_and_a_real_generation(agent: Agent) -> None:
    agent.serve()
    agent.ready()
    found = json.loads(agent.run("doctor", "--json").stdout)
    # Of this test's own making: torch's kernels only, no layout; other agents may run on this machine meanwhile.
    known = {"no-native-kernels", "not-laid-out", "two-agents", "kernel-left-out", "cpu-masked", "disk-low"}
    assert [one for one in found if one["id"] not in known] == []
    deep = agent.run("doctor", "--deep")
    assert "generation-failed" not in deep.stdout


def test_doctor_when_the_agent_was_killed(agent: Agent) -> None:
    process = agent.serve()
    agent.ready()
    process.kill()
    process.wait()
    done = agent.run("doctor")
    assert done.returncode == 69
    assert "[agent-gone]" in done.stdout
    assert "[orphan-worker]" in done.stdout


def test_an_agent_that_cannot_write_its_status_is_not_stuck(agent: Agent) -> None:
    process = agent.serve("ok")
    agent.ready()
    (agent.home / "run" / f".status.json.{process.pid}").mkdir()  # as a full disk: the next draft cannot be written
    agent.until(lambda status: any("status.json cannot be written" in said for said in status["warnings"]), timeout=20)
    done = agent.run("status")
    assert done.returncode == 0
    assert "status.json cannot be written" in done.stdout


def test_a_frozen_agent_is_not_ready(agent: Agent) -> None:
    process = agent.serve("ok")
    agent.ready()
    process.send_signal(signal.SIGSTOP)
    try:
        agent.until(lambda status: status["state"] == "stuck", timeout=20)
        done = agent.run("status")
        assert done.returncode == 69
        assert re.fullmatch(r"stuck: the agent has not turned for 1\d s", done.stdout.splitlines()[0])
        shown = json.loads(agent.run("status", "--json").stdout)
        assert (shown["ready"], shown["live"], shown["model"]) == (False, False, "tiny")
        waited = agent.run("status", "--wait", "--timeout", "3")
        assert waited.returncode == 75
        assert len(waited.stdout.splitlines()) == 1, "it only counts on"
        assert agent.run("chat", "hello").returncode == 69
    finally:
        process.send_signal(signal.SIGCONT)
    agent.ready(timeout=20)
    assert agent.run("status").returncode == 0
