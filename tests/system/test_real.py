"""Real vLLM with the embedded model under the shipped unit, hardening and all, on one booted host. The order counts: the
first test quantizes, the others go on from there."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.system import times
from tests.system.installation import REAL_SETTINGS, host
from tests.system.service import UNIT, Service, Traces

START_S = 240.0
AGAIN_S = 150.0
HOG = """# takes memory of its control group until the kernel has killed something there
import glob, time
held = []
places = glob.glob("/sys/fs/cgroup/memory/system.slice/appliance.service/memory.oom_control") + glob.glob("/sys/fs/cgroup/system.slice/appliance.service/memory.events")
count = lambda: [line for place in places for line in open(place) if line.startswith("oom_kill ")]
before = count()
while count() == before and len(held) < 500:
    held.append(b"x" * (8 << 20))
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def real(real_layer: str) -> Iterator[Service]:
    with host(real_layer, disk="12G") as made:
        service = Service(made)
        made.run(f"systemctl enable {UNIT} && sync", check=True)  # else the power cut takes it back
        yield service


@pytest.fixture
def serving(real: Service) -> Service:
    if real.state() not in ("active", "activating"):
        real.host.run(["systemctl", "reset-failed", UNIT])
        real.begin()
    real.wait_ready(START_S)
    return real


def test_power_cut_and_reboot_while_quantizing(real: Service) -> None:
    real.begin()
    real.wait_for(lambda status: (status.get("progress") or {}).get("done"), 60, "quantizing")
    real.host.powercut()
    real.host.boot(wait=False)
    real.wait_for(lambda status: status.get("live") and (status.get("progress") or {}).get("done"), 60, "quantizing again")
    began = time.monotonic()
    real.host.reboot()
    down = time.monotonic() - began
    status = real.wait_ready(START_S)
    real.until_answers(10)
    times.record(case="vLLM: power cut, then reboot, while quantizing", fault="-", sentence=f"down {down:.1f} s; {status['sentence']}",
                 answered_s=time.monotonic() - began)
    left = real.host.run("find /var/lib/appliance/store -maxdepth 2 -name '*draft*' -o -maxdepth 2 -name '*.part'").out
    assert len(left.splitlines()) <= 1, left
    assert real.host.run(["applianctl", "model", "verify"]).rc == 0


def test_it_works_as_confined_as_it_is(serving: Service) -> None:
    """Executable mappings, pinned threads, NUMA policy, shared memory, smaps of children: all of it under the unit."""
    status = serving.status()
    assert status["kernel"].split()[0] in ("native", "aten")
    assert status["rung"] == "full"
    serving.wait_for(lambda status: status.get("memory_bytes"), 30, "memory is measured")
    assert serving.status()["memory_bytes"] > 200 << 20
    log = serving.host.run(["cat", "/var/lib/appliance/state/worker.log"]).out
    for line in ("Operation not permitted", "Permission denied", "Read-only file system", "ulimit"):
        assert line not in log or line == "ulimit", line
    engine = serving.engine()
    confined = serving.host.run(["sh", "-c", f"grep -E 'Seccomp:|NoNewPrivs|CapBnd' /proc/{engine}/status"]).out
    assert "Seccomp:\t2" in confined
    assert "NoNewPrivs:\t1" in confined
    assert "CapBnd:\t0000000000000000" in confined


Cause = Callable[[Service], None]
FAULTS: dict[str, tuple[Cause, tuple[str, ...], float]] = {
    "kill -9 API process": (lambda s: s.kill(s.leader(), "KILL"), ("killed",), 3),
    "kill -9 engine": (lambda s: s.kill(s.engine(), "KILL"), ("killed", "crash"), 12),
    "SIGSTOP engine (hang)": (lambda s: s.kill(s.engine(), "STOP"), ("hang",), 35),
    "SIGSTOP API process (hang)": (lambda s: s.kill(s.leader(), "STOP"), ("hang",), 35),
    "SIGSEGV in the engine": (lambda s: s.kill(s.engine(), "SEGV"), ("crash",), 12),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fault(serving: Service, case: str) -> None:
    cause, names, notice_s = FAULTS[case]
    if "hang" in names:  # a second one in a row would step down a rung, rightly
        reset(serving)
    before, session = settled(serving), serving.leader()
    after = serving.survive(f"vLLM: {case}", lambda: cause(serving), faults=names, detect_s=notice_s, answer_s=AGAIN_S)
    serving.worker_session_gone(session)
    assert after["rung"] == "full"
    serving.leaves_nothing(before, slack_bytes=128 << 20)


def test_frozen_under_load_ends_the_requests(serving: Service) -> None:
    """A client whose worker freezes gets an error, not silence."""
    stream = serving.host.popen(
        "curl -s -N -m 120 -w '\\n%{http_code} %{time_total}\\n' -H 'content-type: application/json' -d "
        "'{\"model\":\"default\",\"prompt\":\"Once upon a time\",\"max_tokens\":1500,\"stream\":true,\"ignore_eos\":true}' "
        "http://127.0.0.1:8000/v1/completions", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    serving.wait_for(lambda status: status.get("running"), 10, "a stream")
    time.sleep(1)
    serving.survive("vLLM: SIGSTOP engine during a stream", lambda: serving.kill(serving.engine(), "STOP"), faults=("hang",), detect_s=35, answer_s=AGAIN_S)
    output = stream.communicate(timeout=30)[0]
    assert "[DONE]" not in output
    assert float(output.split()[-1]) < 60, output[-200:]


def test_sigill_steps_down_a_rung(serving: Service) -> None:
    after = serving.survive("vLLM: SIGILL in the engine", lambda: serving.kill(serving.engine(), "ILL"), faults=("unsupported-isa",),
                            detect_s=12, answer_s=AGAIN_S)
    assert after["rung"] != "full"
    assert after["rung_reason"]
    reset(serving)


def test_killed_agent_takes_vllm_along(serving: Service) -> None:
    before, session, agent = settled(serving), serving.leader(), serving.agent()
    began = time.monotonic()
    serving.kill(agent, "KILL")
    while serving.agent() in (agent, 0):
        assert time.monotonic() - began < 20
        time.sleep(0.1)
    noticed = time.monotonic() - began
    serving.worker_session_gone(session)
    serving.until_answers(AGAIN_S)
    times.record(case="vLLM: kill -9 agent", fault="signal", sentence="systemd starts it again", detected_s=noticed, answered_s=time.monotonic() - began)
    serving.leaves_nothing(before, slack_bytes=128 << 20)


def test_cgroup_oom(serving: Service) -> None:
    """MemoryMax is planned for; then something else in the unit's group takes what is left."""
    serving.drop_in("memory", "[Service]\nMemoryMax=2G\n")
    serving.host.run(["systemctl", "restart", UNIT], check=True, timeout_s=AGAIN_S)
    status = serving.wait_ready(AGAIN_S)
    assert status["ceiling_bytes"] <= 2 << 30
    agent = serving.agent()
    serving.host.write("/root/hog.py", HOG)
    join = f"for d in /sys/fs/cgroup/memory/system.slice/{UNIT} /sys/fs/cgroup/system.slice/{UNIT}; do echo $$ >$d/cgroup.procs; done 2>/dev/null"

    hogs: list[subprocess.Popen[str]] = []

    def cause() -> None:
        hogs.append(serving.host.popen(["sh", "-c", f"{join}; exec python3 /root/hog.py"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    after = serving.survive("vLLM: cgroup OOM (MemoryMax)", cause, faults=("oom-kill",), detect_s=40, answer_s=AGAIN_S)
    hogs[0].wait(timeout=30)
    assert serving.agent() == agent
    assert after["rung"] != "full"
    serving.host.run(f"rm /etc/systemd/system/{UNIT}.d/memory.conf; systemctl daemon-reload; applianctl reset")
    serving.host.run(["systemctl", "restart", UNIT], check=True, timeout_s=AGAIN_S)


def test_corrupt_prepared_weights_are_made_again(serving: Service) -> None:
    serving.host.run(["systemctl", "stop", UNIT], check=True, timeout_s=100)
    damaged = serving.host.run("f=$(find /var/lib/appliance/store/prepared -type f -size +1M | head -1); chmod u+w \"$f\" && truncate -s -4096 \"$f\" && echo \"$f\"").out
    assert damaged.strip(), "there is no prepared layout"
    began = time.monotonic()
    serving.begin()
    status = serving.wait_ready(START_S)
    serving.until_answers(10)
    said = [line for line in serving.journal().splitlines() if "weights" in line or "damaged" in line]
    times.record(case="vLLM: corrupt prepared weights", fault="-", sentence=(said or [status["sentence"]])[-1], answered_s=time.monotonic() - began)
    assert "Paris" in json.loads(serving.ask()[1])["choices"][0]["text"]


def test_case_017_a_tiny_dev_shm_of_its_own(serving: Service) -> None:
    """One worker process needs no shared memory to speak of; were it not so, the service would have to say it."""
    serving.drop_in("shm", "[Service]\nTemporaryFileSystem=/dev/shm:size=1M,mode=1777\n")
    serving.host.run(["systemctl", "restart", UNIT], timeout_s=AGAIN_S)
    status = serving.wait_for(lambda status: status.get("ready") or status.get("state") == "failed", AGAIN_S, "ready or a reason")
    assert status["ready"] or "/dev/shm" in status["sentence"], status["sentence"]
    times.record(case="vLLM: /dev/shm of 1 MB (17)", fault="-", sentence=status["sentence"])
    serving.host.run(f"rm /etc/systemd/system/{UNIT}.d/shm.conf; systemctl daemon-reload; systemctl reset-failed {UNIT}")
    serving.host.run(["systemctl", "restart", UNIT], timeout_s=AGAIN_S)


def test_threads_are_pinned_where_the_settings_say(serving: Service) -> None:
    serving.write_settings(REAL_SETTINGS + "cpu: {cpus: [0], threads: 1}\n")
    worker = serving.leader()
    serving.host.run(["systemctl", "reload", UNIT], check=True, timeout_s=60)
    serving.wait_for(lambda status: status.get("ready") and status.get("worker_pid") not in (None, worker), AGAIN_S, "on one CPU")
    threads = serving.host.run(["sh", "-c", f"grep -h Cpus_allowed_list /proc/{serving.engine()}/task/*/status"]).out
    assert {line.split()[-1] for line in threads.splitlines()} == {"0"}, threads


def test_two_engines_each_on_its_own_cpu(serving: Service) -> None:
    serving.write_settings(REAL_SETTINGS + "cpu: {engines: 2}\nworker: {env: {APPLIANCE_COPIED: '1'}}\n")
    worker = serving.leader()
    serving.host.run(["systemctl", "reload", UNIT], check=True, timeout_s=60)
    status = serving.wait_for(lambda status: status.get("ready") and status.get("worker_pid") not in (None, worker), AGAIN_S, "two engines")
    assert status["engines"] == 2
    engines = serving.host.run(["pgrep", "-f", "^VLLM::EngineCore_DP"]).out.split()
    assert len(engines) == 2
    cpus = [{line.split()[-1] for line in serving.host.run(["sh", "-c", f"grep -h Cpus_allowed_list /proc/{engine}/task/*/status"]).out.splitlines()}
            for engine in engines]
    assert sorted(map(sorted, cpus)) == [["0"], ["1"]]
    serving.until_answers(30)
    log = serving.host.run(["cat", "/var/lib/appliance/state/worker.log"]).out
    assert log.count("weights copied from") == 2, "under the unit's seccomp filter too"
    assert "Operation not permitted" not in log


def reset(service: Service) -> None:
    """Forget faults and rungs; only on a lower rung that starts the worker anew."""
    service.control("reset").ok()
    service.wait_for(lambda status: status.get("ready") and status.get("rung") == "full", AGAIN_S, "reset")
    service.until_answers(AGAIN_S)


def settled(service: Service) -> Traces:
    """The traces when memory has stopped moving: pages are touched by the first answers."""
    service.until_answers(30)
    last = service.traces()
    for _ in range(20):
        time.sleep(1)
        now = service.traces()
        if abs(now.memory_bytes - last.memory_bytes) < 4 << 20:
            return now
        last = now
    return last
