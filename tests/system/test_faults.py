"""Faults on a booted host with the fake worker: each is noticed, named and healed, and leaves nothing behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

from tests.system import times
from tests.system.installation import FAKE_SETTINGS, host
from tests.system.service import UNIT, Service

Cause = Callable[[Service], None]
PROBE_S = 2.0
"""probe_s of FAKE_SETTINGS: a frozen worker is replaced within two of these, and what its end takes."""
AGENT_RESTART_S = 15.0
"""RestartSec and the start of a new agent and worker."""

FAULTS: dict[str, tuple[Cause, tuple[str, ...], float]] = {
    # case: cause, its names, seconds to notice
    "kill -9 API process": (lambda s: s.kill(s.leader(), "KILL"), ("killed",), 1.5),
    "kill -9 engine": (lambda s: s.kill(s.engine(), "KILL"), ("killed", "crash"), 2.5),
    "kill -15 API process": (lambda s: s.kill(s.leader(), "TERM"), ("killed", "stopped", "worker-died"), 2.5),
    "SIGSEGV in the engine": (lambda s: s.misbehave("die-segv"), ("crash",), 2.5),
    "exception in the engine": (lambda s: s.misbehave("raise"), ("crash", "worker-died"), 2.5),
    "SIGILL in the engine": (lambda s: s.misbehave("die-ill"), ("unsupported-isa",), 2.5),
    "allocation fails": (lambda s: s.misbehave("oom-log"), ("out-of-memory",), 2.5),
    "SIGSTOP engine (hang)": (lambda s: s.kill(s.engine(), "STOP"), ("hang",), 2 * PROBE_S + 2),
    "SIGSTOP API process (hang)": (lambda s: s.kill(s.leader(), "STOP"), ("hang",), 2 * PROBE_S + 2),
    "engine sleeps (hang)": (lambda s: s.misbehave("hang"), ("hang",), 2 * PROBE_S + 2),
    "port open, nobody answers (75)": (lambda s: s.misbehave("deaf"), ("hang",), 3 * PROBE_S + 2),
    "only errors": (lambda s: s.misbehave("error"), ("hang",), 6 * PROBE_S),
}
STEP_DOWN = ("unsupported-isa", "out-of-memory")


@pytest.mark.parametrize("case", FAULTS)
def test_worker_fault(running: Service, case: str) -> None:
    cause, names, notice_s = FAULTS[case]
    before, agent, session = running.traces(), running.agent(), running.leader()
    after = running.survive(case, lambda: cause(running), faults=names, detect_s=notice_s, answer_s=notice_s + 20)
    assert running.agent() == agent, "the agent itself went"
    assert after["worker_pid"] != session
    running.worker_session_gone(session)
    if after["restarts"][-1]["fault"] in STEP_DOWN:
        assert after["rung"] != "full"
        assert after["rung_reason"]
    else:
        assert after["rung"] == "full"
    running.leaves_nothing(before)


def test_case_011_deaf_and_renamed_children_go_with_their_worker(service: Service) -> None:
    """A worker that ignores SIGTERM, with a child that renamed itself and ignores it too."""
    service.write_settings(FAKE_SETTINGS.replace("FAKE: ok", "FAKE: stubborn").replace("drain_s: 10", "drain_s: 1"))
    service.start()
    service.wait_ready()
    before, session = service.traces(), service.leader()
    service.survive("kill -9 API process, its child deaf and renamed (11)", lambda: service.kill(session, "KILL"), faults=("killed",), detect_s=3, answer_s=20)
    service.worker_session_gone(session)
    service.leaves_nothing(before)
    began = time.monotonic()
    service.host.run(["systemctl", "stop", UNIT], check=True, timeout_s=60)
    times.record(case="stop of a worker deaf to SIGTERM (63)", fault="-", sentence=f"stopped in {time.monotonic() - began:.1f} s")
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert service.processes() == []


def test_rung_outlives_a_reboot_and_reset_leaves_it(running: Service) -> None:
    running.host.run(["systemctl", "enable", UNIT], check=True)
    after = running.survive("SIGILL at the first forward", lambda: running.misbehave("die-ill"), faults=("unsupported-isa",),
                            detect_s=3, answer_s=20)
    rung = after["rung"]
    running.host.reboot()
    assert running.wait_ready(60)["rung"] == rung
    running.control("reset").ok()
    running.wait_for(lambda status: status.get("rung") == "full" and status.get("ready"), 30, "reset")


def test_watchdog_ends_a_stopped_agent(running: Service) -> None:
    before, session = running.traces(), running.leader()
    running.drop_in("watchdog", "[Service]\nWatchdogSec=4\n")
    running.host.run(["systemctl", "restart", UNIT], check=True)
    running.wait_ready()
    agent = running.agent()
    began = time.monotonic()
    running.kill(agent, "STOP")
    _until(lambda: running.agent() not in (agent, 0), 40)
    noticed = time.monotonic() - began
    running.until_answers(40)
    times.record(case="SIGSTOP agent (watchdog)", fault="watchdog", sentence=_last_result(running), detected_s=noticed,
                 answered_s=time.monotonic() - began)
    assert "Failed with result 'watchdog'" in running.journal()
    running.worker_session_gone(session)
    running.leaves_nothing(before)


def test_killed_agent_takes_its_worker_along(running: Service) -> None:
    before, session, agent = running.traces(), running.leader(), running.agent()
    began = time.monotonic()
    running.kill(agent, "KILL")
    _until(lambda: running.agent() not in (agent, 0), AGENT_RESTART_S)
    noticed = time.monotonic() - began
    running.until_answers(AGENT_RESTART_S)
    times.record(case="kill -9 agent", fault="signal", sentence=_last_result(running), detected_s=noticed, answered_s=time.monotonic() - began)
    running.worker_session_gone(session)
    running.leaves_nothing(before)


def test_cgroup_oom_is_named_and_a_rung_is_left(service: Service) -> None:
    service.drop_in("memory", "[Service]\nMemoryMax=1100M\n")
    service.write_settings(FAKE_SETTINGS.replace("reserve: 64M", "reserve: 16M"))
    service.start()
    service.wait_ready()
    before, agent = service.traces(), service.agent()
    after = service.survive("cgroup OOM (MemoryMax)", lambda: service.misbehave("leak", "400"), faults=("oom-kill",), detect_s=20, answer_s=40)
    assert service.agent() == agent, "OOMPolicy=continue keeps the agent"
    assert after["rung"] != "full"
    service.leaves_nothing(before)


def test_case_017_twenty_restarts_leave_nothing_in_shared_memory(running: Service) -> None:
    before = running.traces()
    for _ in range(20):
        session = running.leader()
        running.control("restart", "--no-wait")
        running.wait_for(lambda status, old=session: status.get("ready") and status.get("worker_pid") not in (None, old), 30, "restarted")
    running.leaves_nothing(before)


def test_loading_is_cut_short_by_a_reboot_and_starts_again(service: Service) -> None:
    service.host.run(["systemctl", "enable", UNIT], check=True)
    service.write_settings(FAKE_SETTINGS.replace("model: tiny\n", ""))
    service.host.run("echo 60 >/run/fake/slow-quantize", check=True)
    service.begin()
    service.wait_for(lambda status: status.get("state") == "preparing" and status.get("progress"), 15, "quantizing")
    began = time.monotonic()
    service.host.reboot()
    down = time.monotonic() - began
    service.wait_for(lambda status: status.get("live") or status.get("state") == "failed", 30, "after the reboot")
    left = service.host.run("ls -A /var/lib/appliance/store/drafts /var/lib/appliance/store/tmp 2>/dev/null").out.split()
    service.wait_for(lambda status: status.get("state") not in ("preparing", None, "starting"), 60, "prepared")
    assert len(left) <= 1, left
    times.record(case="reboot in the middle of quantizing", fault="-", sentence=service.status()["sentence"], detected_s=down, answered_s=time.monotonic() - began)
    assert down < 20, "the stop was not bounded"


@pytest.fixture
def small_store(fake_layer: str) -> Iterator[Service]:
    """A volume of 256 MB below the state folder."""
    with host(fake_layer, volumes=[("/var/lib/appliance", "256M")]) as made:
        made.run("chown appliance:appliance /var/lib/appliance && chmod 750 /var/lib/appliance", check=True)
        yield Service(made)


def test_full_disk_is_named_and_healed_by_space(small_store: Service) -> None:
    """A service that ran well is to serve a model that must be made first, and the disk is full."""
    service = small_store
    service.begin()
    service.wait_for(lambda status: "tiny" in str(status.get("sentence")), 20, "the first start")
    service.host.run(["systemctl", "stop", UNIT], check=True)
    service.write_settings(FAKE_SETTINGS.replace("model: tiny\n", ""))
    service.host.run("head -c 300M /dev/zero >/var/lib/appliance/ballast; df /var/lib/appliance")
    began = time.monotonic()
    service.begin()
    found = service.wait_for(lambda status: "full" in str(status.get("sentence")) or "space" in str(status.get("sentence")), 20, "disk full")
    detected = time.monotonic() - began
    service.host.run("rm /var/lib/appliance/ballast", check=True)
    freed = time.monotonic()
    service.wait_for(lambda status: status.get("state") in ("loading", "answering", "ready") or status.get("progress"), 90, "goes on")
    times.record(case="disk full in the store", fault=str(found.get("fault")), sentence=found["sentence"], detected_s=detected,
                 answered_s=time.monotonic() - freed)


def test_power_cut_during_commits_leaves_whole_objects(fake_layer: str) -> None:
    """All is killed at once, unwritten pages lost, while models are added and named again and again."""
    with host(fake_layer) as made:
        service = Service(made)
        made.run(["systemctl", "enable", UNIT], check=True)
        service.start()
        service.wait_ready()
        source = made.run("mkdir -p /srv/source && cp -r /var/lib/appliance/store/objects/*/. /srv/source/ && rm -f /srv/source/manifest.json && "
                          "chmod -R a+rX /srv/source && echo ok")
        assert source.out.strip() == "ok", source
        adding = made.popen("n=0; while :; do n=$((n+1)); echo \"$n\" >/srv/source/note.json; applianctl model add /srv/source --name spare; done")
        for wait_s in (1.0, 1.7, 2.3):
            time.sleep(wait_s)
            began = time.monotonic()
            made.powercut()
            adding.wait()
            made.boot(wait=False)
            service.wait_ready(60)
            service.until_answers(20)
            answered = time.monotonic() - began
            adding = made.popen("n=0; while :; do n=$((n+1)); echo \"$n\" >/srv/source/note.json; applianctl model add /srv/source --name spare; done")
        adding.kill()
        made.run(["pkill", "-f", "model add"])
        adding.wait()
        listed = made.run("ls /var/lib/appliance/store/names; ls -A /var/lib/appliance/store/objects | wc -l").out.split()
        assert {"tiny", "spare"} <= set(listed), listed
        verified = made.run(["applianctl", "model", "verify"])
        assert verified.rc == 0, verified
        times.record(case="power cut while the store is written", fault="-", sentence=verified.out.strip().splitlines()[-1][:100], answered_s=answered)


def test_corrupt_weights_are_named(running: Service) -> None:
    """Bytes of a stored object flip: verification names it, and the service says so instead of serving nonsense."""
    running.host.run(["systemctl", "stop", UNIT], check=True)
    running.host.run("chmod -R u+w /var/lib/appliance/store/objects && cd /var/lib/appliance/store/objects/* && head -c 64 /dev/urandom >model.safetensors", check=True)
    began = time.monotonic()
    running.begin()
    found = running.wait_for(lambda status: "damaged" in str(status.get("sentence")), 30, "named")
    assert not found["ready"]
    assert "model.safetensors" in found["sentence"]
    times.record(case="corrupt weights, no second copy", fault="damaged", sentence=found["sentence"], detected_s=time.monotonic() - began)
    assert running.ask()[0] in (0, 503)  # a damaged model without its source is given up: exit code 65


def test_flooded_log_loses_no_fault(running: Service) -> None:
    running.misbehave("log-flood", "64")
    time.sleep(2)
    size = "stat -c %s /var/lib/appliance/state/worker.log"
    seen = ""
    while (now := running.host.run(size).out) != seen:  # a crash in the middle of the flood may drown in it
        seen = now
        time.sleep(2)
    running.survive("crash after 64 MiB of log", lambda: running.misbehave("die-segv"), faults=("crash",), detect_s=15, answer_s=40)
    log = running.host.run("du -cb /var/lib/appliance/state/worker.log* | tail -1").out
    assert int(log.split()[0]) < 300 << 20
    record = json.loads(running.host.run(["cat", "/var/lib/appliance/state/record.json"]).out)
    assert "crash" in json.dumps(record)


def _until(test: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not test():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.1)


def _last_result(service: Service) -> str:
    lines = [line for line in service.journal().splitlines() if "Failed with result" in line or "Main process exited" in line]
    return lines[-1].removeprefix(f"{UNIT}: ") if lines else ""
