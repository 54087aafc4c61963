"""The unit by itself: what systemd says of it, its life from start to stop, notifications, limits, configuration errors."""

from __future__ import annotations

import json
import re
import subprocess
import time

import pytest

from tests.system import times
from tests.system.installation import FAKE_SETTINGS
from tests.system.service import UNIT, Service

EXPOSURE = 1.8


def test_unit_is_clean_and_confined(service: Service) -> None:
    checked = service.host.run(["systemd-analyze", "verify", UNIT])
    assert checked.rc == 0
    assert checked.out + checked.err == ""
    judged = service.host.run(["systemd-analyze", "security", UNIT, "--no-pager"]).out
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", judged)
    assert exposure
    assert float(exposure[1]) <= EXPOSURE, judged


def test_starts_answers_and_stops(service: Service) -> None:
    began = time.monotonic()
    seconds = service.start()
    status = service.wait_ready()
    assert service.ask()[0] == 200
    shown = service.show("ActiveState", "SubState", "StatusText", "NotifyAccess", "MainPID")
    assert (shown["ActiveState"], shown["SubState"]) == ("active", "running")
    assert shown["StatusText"].startswith("ready: serving tiny")
    assert status["managed_by"] == "systemd"
    assert status["unit"] == UNIT
    session = service.leader()
    stopping = time.monotonic()
    service.host.run(["systemctl", "stop", UNIT], check=True)
    stopped = time.monotonic() - stopping
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert service.processes() == []
    service.worker_session_gone(session)
    assert service.status()["sentence"] == "stopped: no worker process is left"
    times.record(case="start and stop (fake worker)", fault="-", sentence=f"ready {seconds:.1f} s after start, stopped in {stopped:.1f} s",
                 answered_s=time.monotonic() - began)


def test_ready_comes_after_the_first_answer(service: Service) -> None:
    service.write_settings(FAKE_SETTINGS.replace("FAKE: ok", "FAKE: slow"))
    service.begin()
    service.wait_for(lambda status: status.get("state") == "loading", 20, "loading")
    assert service.state() == "activating"
    assert service.host.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code} %header{retry-after}", "http://127.0.0.1:8000/readyz"]).out.startswith("503")
    assert service.wait_unit(["active", "failed"], 30) == "active"
    assert service.status()["last_answer_at"]


def test_case_055_children_cannot_speak_for_the_service(running: Service) -> None:
    for entry in running.processes():
        environment = running.host.run(["cat", f"/proc/{entry[0]}/environ"]).out
        if entry[0] != running.agent():
            assert "NOTIFY_SOCKET" not in environment
            assert "WATCHDOG" not in environment
    forged = ("python3 -c \"import socket; s=socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect('/run/systemd/notify'); "
              "s.send(b'STATUS=forged\\nREADY=1\\nWATCHDOG=1\\nMAINPID=1')\"")
    # A process of the unit's own cgroup, as a child of the worker would be.
    script = f"for d in /sys/fs/cgroup/*/system.slice/{UNIT}; do echo $$ >$d/cgroup.procs; done 2>/dev/null; {forged}; sleep 0.2"
    running.host.run(["sh", "-c", script], user=None)
    shown = running.show("StatusText", "MainPID")
    assert "forged" not in shown["StatusText"]
    assert int(shown["MainPID"]) == running.status()["agent"]["pid"]


def test_case_056_memory_deny_write_execute_is_named(service: Service) -> None:
    service.drop_in("mdwe", "[Service]\nMemoryDenyWriteExecute=yes\n")
    began = time.monotonic()
    assert service.host.run(["systemctl", "start", UNIT]).rc != 0
    assert time.monotonic() - began < 10
    shown = service.show("ActiveState", "ExecMainStatus", "NRestarts")
    assert shown == {"ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}
    assert "MemoryDenyWriteExecute" in service.journal()
    assert "MemoryDenyWriteExecute" in service.status()["sentence"]


def test_case_059_configuration_error_stops_and_a_fix_starts(service: Service) -> None:
    service.write_settings("listen: {port: yes please}\n")
    for _ in range(6):  # more than any start limit would allow
        assert service.host.run(["systemctl", "start", UNIT]).rc != 0
    time.sleep(6)  # RestartSec: nothing may come
    shown = service.show("ActiveState", "ExecMainStatus", "NRestarts", "Result")
    assert shown == {"ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0", "Result": "exit-code"}
    said = service.control("status")
    assert "listen.port" in said.out + said.err, said
    service.write_settings(FAKE_SETTINGS)
    began = time.monotonic()
    done = service.control("start")
    assert done.rc == 0, done
    service.until_answers(30)
    times.record(case="bad config, then fixed (59)", fault="configuration", sentence=said.out.strip() or said.err.strip(), answered_s=time.monotonic() - began)


def test_case_012_port_taken_is_said_at_once_and_retried(service: Service) -> None:
    holder = service.host.popen(["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    service.host.run("for i in $(seq 50); do curl -s -o /dev/null http://127.0.0.1:8000/ && break; sleep 0.1; done")
    began = time.monotonic()
    service.begin()
    service.wait_for(lambda status: "8000" in str(status.get("sentence")), 10, "port taken")
    detected = time.monotonic() - began
    sentence = service.status()["sentence"]
    service.wait_unit(["activating", "failed"], 5)
    service.wait_for(lambda _: service.show("ExecMainStatus")["ExecMainStatus"] == "75", 10, "exit status 75")
    holder.terminate()
    service.host.run(["pkill", "-f", "http.server 8000"])
    holder.wait()
    freed = time.monotonic()
    service.until_answers(40)
    times.record(case="port taken (12)", fault="port-taken", sentence=sentence, detected_s=detected, answered_s=time.monotonic() - freed)
    assert detected < 5  # 0.4 s on an idle machine; what counts is: before a model is made or loaded


@pytest.mark.parametrize("interval", ["2", "500ms", "0"])
def test_case_053_watchdog_intervals(service: Service, interval: str) -> None:
    """Any interval is kept, and none means no pings: the service lives either way."""
    service.drop_in("watchdog", f"[Service]\nWatchdogSec={interval}\n")
    service.start()
    service.wait_ready()
    before = service.show("MainPID", "NRestarts", "WatchdogTimestampMonotonic")
    time.sleep(5)
    after = service.show("MainPID", "NRestarts", "WatchdogTimestampMonotonic", "ActiveState")
    assert (after["MainPID"], after["NRestarts"], after["ActiveState"]) == (before["MainPID"], "0", "active")
    if interval == "0":
        assert after["WatchdogTimestampMonotonic"] == before["WatchdogTimestampMonotonic"]
    else:
        assert int(after["WatchdogTimestampMonotonic"]) > int(before["WatchdogTimestampMonotonic"]) + 4_000_000


def test_case_053_slow_start_with_progress_is_waited_for(service: Service) -> None:
    """Longer than TimeoutStartSec, which only progress extends."""
    service.drop_in("short", "[Service]\nTimeoutStartSec=8\n")
    service.write_settings(FAKE_SETTINGS.replace("model: tiny\n", ""))
    service.host.run("echo 25 >/run/fake/slow-quantize", check=True)
    began = time.monotonic()
    service.begin()
    service.wait_for(lambda status: status.get("state") == "preparing" and status.get("progress"), 10, "progress")
    time.sleep(14)
    assert service.state() == "activating"
    service.wait_unit(["active", "failed", "inactive"], 60)
    times.record(case="slow start with progress (53)", fault="-", sentence=service.status()["sentence"], answered_s=time.monotonic() - began)


def test_case_053_stalled_start_ends(service: Service) -> None:
    """No progress: the limit is not extended again, and systemd ends the start."""
    service.drop_in("short", "[Service]\nTimeoutStartSec=8\n")
    service.write_settings(FAKE_SETTINGS.replace("model: tiny\n", ""))
    service.host.run("touch /run/fake/stuck-quantize", check=True)
    began = time.monotonic()
    service.begin()
    service.wait_for(lambda status: status.get("state") == "preparing", 15, "preparing")
    while "start operation timed out" not in service.journal():
        assert time.monotonic() - began < 180, service.journal()[-2000:]
        time.sleep(0.5)
    ended = time.monotonic() - began
    service.host.run("rm /run/fake/stuck-quantize", check=True)
    freed = time.monotonic()
    service.until_answers(60)
    times.record(case="start without progress (53)", fault="timeout", sentence="start operation timed out. Terminating.", detected_s=ended,
                 answered_s=time.monotonic() - freed)


def test_reload_takes_another_limit_without_a_restart(running: Service) -> None:
    agent, worker = running.agent(), running.leader()
    running.write_settings(FAKE_SETTINGS + "max_queued: 3\n")
    running.host.run(["systemctl", "reload", UNIT], check=True, timeout_s=30)
    assert (running.agent(), running.state()) == (agent, "active")
    running.wait_for(lambda status: status.get("max_queued") == 3 or status.get("worker_pid") != worker, 20, "reloaded")
    running.write_settings("listen: {port: -3}\n")
    done = running.host.run(["systemctl", "reload", UNIT], timeout_s=30)
    assert running.state() == "active", done
    running.wait_for(lambda status: "listen.port" in json.dumps(status["warnings"]), 5, "the refusal is shown")
    running.until_answers(20)


SENTINEL = "sentinel-key-5f0c1e7d"


def test_case_062_credential_guards_and_appears_nowhere(service: Service) -> None:
    service.host.write("/etc/credstore/appliance.api_key", SENTINEL + "\n", 0o600)
    service.start()
    service.wait_for(lambda status: status.get("state") == "ready", 30, "ready")
    assert service.ask()[0] == 401
    with_key = service.host.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "@-", "http://127.0.0.1:8000/v1/models"],
                                input=f"Authorization: Bearer {SENTINEL}\n").out
    assert with_key == "200"
    service.host.run("applianctl support-bundle /root/bundle.tar.gz; applianctl status --json >/root/status; ps axwwe >/root/ps; "
                     "journalctl --no-pager -o export >/root/journal; mkdir -p /root/bundle; tar -xf /root/bundle.tar.gz -C /root/bundle")
    places = "/root/status /root/ps /root/journal /root/bundle /var/lib/appliance /var/cache/appliance /run/appliance /tmp /dev/shm"
    found = service.host.run(f"grep -rlaF {SENTINEL[:-1]} {places} 2>/dev/null | grep -v '/root/.*grep'").out
    assert found == "", found


def test_missing_credential_does_not_break_the_start(service: Service) -> None:
    service.start()
    service.wait_ready()
    assert service.ask()[0] == 200


def test_a_drain_longer_than_the_units_limit_is_granted(service: Service) -> None:
    service.drop_in("short", "[Service]\nTimeoutStopSec=4\n")
    service.write_settings(FAKE_SETTINGS.replace("drain_s: 10", "drain_s: 30"))
    service.start()
    service.wait_ready()
    ask = ("curl -s -N -H 'content-type: application/json' -d '{\"model\":\"default\",\"prompt\":\"x\",\"max_tokens\":3500,\"stream\":true}' "
           "http://127.0.0.1:8000/v1/completions")
    stream = service.host.popen(ask, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    service.wait_for(lambda status: status.get("running"), 10, "a stream")
    began = time.monotonic()
    service.host.run(["systemctl", "stop", UNIT], check=True, timeout_s=60)
    took = time.monotonic() - began
    assert "[DONE]" in stream.communicate(timeout=20)[0]
    assert service.show("Result")["Result"] == "success"
    assert took > 4, "the stream was too short to show anything"


def test_case_063_streams_finish_when_it_stops(running: Service) -> None:
    ask = ("curl -s -N -w '\\n%{http_code}\\n' -H 'content-type: application/json' -d "
           "'{\"model\":\"default\",\"prompt\":\"x\",\"max_tokens\":1500,\"stream\":true,\"ignore_eos\":true}' http://127.0.0.1:8000/v1/completions")
    streams = [running.host.popen(ask, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(3)]
    running.wait_for(lambda status: status.get("running", 0) >= 3, 10, "three streams")
    began = time.monotonic()
    stop = running.host.popen(["systemctl", "stop", UNIT])
    running.wait_for(lambda status: status.get("state") == "stopping", 10, "stopping")
    code, _ = running.ask()
    outputs = [stream.communicate(timeout=60)[0] for stream in streams]
    stop.wait(timeout=60)
    took = time.monotonic() - began
    assert code in (503, 0)
    for output in outputs:
        assert "[DONE]" in output, output[-300:]
    assert running.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert running.processes() == []
    times.record(case="stop during three streams (63)", fault="-", sentence=f"all three finished; stopped {took:.1f} s after the request")
