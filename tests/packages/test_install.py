"""`apt install appliance` with real vLLM and the default model on one booted host without a network; the order counts."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.packages.conftest import ROOT
from tests.packages.layers import packages_of_debian
from tests.packages.node import ALL, Node
from tests.system import times
from tests.system.service import UNIT
from tests.system.testhost.host import Host

READY_S = 400.0
EXPOSURE = 1.8


@pytest.fixture(scope="module")
def whole(make_node: Callable[..., Host]) -> Iterator[Node]:
    with make_node(disk="12G") as host:
        yield Node(host)


def test_one_apt_install_without_a_network_and_it_answers(whole: Node) -> None:
    seconds = whole.install("appliance")
    began = time.monotonic()
    waiting = whole.host.popen(["applianctl", "status", "--wait"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    phases: list[str] = []
    while waiting.poll() is None and time.monotonic() - began < READY_S:
        shown = str(whole.show("StatusText").get("StatusText"))
        if not phases or phases[-1] != shown:
            phases.append(shown)
        time.sleep(0.2)
    said = waiting.communicate(timeout=5)[0]
    assert waiting.returncode == 0, said + whole.journal()[-3000:]
    ready = time.monotonic() - began
    assert whole.answers_paris()
    assert whole.state() == "active"
    assert whole.host.run(["systemctl", "is-enabled", UNIT]).out.strip() == "enabled"
    status = whole.status()
    assert status["kernel"].split()[0] == "native"
    words = {phase.split(":")[0].split(",")[0] for phase in phases}
    assert {"preparing", "loading"} <= words, phases
    figures = {"apt install": round(seconds, 1), "then ready": round(ready, 1), "installed MB": whole.installed_mb()}
    (ROOT / "build/system").mkdir(parents=True, exist_ok=True)
    (ROOT / "build/system/packages.json").write_text(json.dumps(figures, indent=1))
    times.record(case="packages: apt install without a network", fault="-", sentence=json.dumps(figures), answered_s=seconds + ready)


def test_what_was_installed_is_whole_and_confined(whole: Node) -> None:
    assert whole.verify(*ALL) == ""
    judged = whole.host.run(["systemd-analyze", "security", UNIT, "--no-pager"]).out
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", judged)
    assert exposure
    times.record(case="packages: systemd-analyze security", fault="-", sentence=f"exposure {exposure[1]}")
    assert float(exposure[1]) <= EXPOSURE
    log = whole.file("/var/lib/appliance/state/worker.log").read_text()
    assert "ModuleNotFoundError" not in log
    assert whole.host.run("find /usr/lib/appliance/worker/ -type f -newer /var/lib/dpkg/info/appliance-worker.list").out == ""  # nothing is compiled there


@pytest.mark.parametrize("request_body", [
    {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
    {"messages": [{"role": "user", "content": "A number as JSON."}], "max_tokens": 24, "response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}}},
    {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 24, "tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]},
], ids=["chat with log-probabilities", "JSON schema", "tools"])
def test_nothing_that_a_request_imports_was_left_out(whole: Node, request_body: dict[str, object]) -> None:
    done = whole.host.run(["curl", "-s", "-m", "60", "-H", "content-type: application/json", "-d", json.dumps({"model": "default", **request_body}),
                           "http://127.0.0.1:8000/v1/chat/completions"], timeout_s=70)
    assert json.loads(done.out)["choices"][0]["message"], done.out


def test_a_graph_is_compiled_where_the_suggested_packages_are_installed(whole: Node, tmp_path: Path) -> None:
    """As models without fused layers are served: with g++, and with the headers of torch that the package keeps."""
    packages_of_debian(["g++", "libpython3-dev"], tmp_path)
    whole.host.push(tmp_path, "/root/compiler")
    whole.host.run("dpkg -i /root/compiler/*.deb && rm -r /root/compiler", check=True, timeout_s=300)
    settings = whole.file("/etc/appliance/appliance.yaml").read_text()
    whole.write_settings("compile: true\n")
    began = time.monotonic()
    whole.host.run(["systemctl", "--no-block", "restart", UNIT], check=True)
    whole.wait_for(lambda status: not status.get("ready"), 60, "restarted")
    whole.wait_ready(READY_S)
    times.record(case="packages: a compiled start", fault="-", sentence=str(whole.status()["sentence"]), answered_s=time.monotonic() - began)
    assert whole.answers_paris()
    assert whole.status()["rung"] == "full"  # and no rung that goes without the compiler
    assert whole.host.run("find /var/cache/appliance -name '*.so' -path '*inductor*' | head -n 1").out
    whole.write_settings(settings)


def test_removed_it_is_gone_and_its_data_stay(whole: Node) -> None:
    objects = whole.host.run("ls /var/lib/appliance/store/objects").out
    whole.apt("remove", *ALL).ok()
    assert whole.processes() == []
    assert not whole.file("/usr/lib/appliance").exists()
    assert not whole.file("/usr/bin/applianctl").exists()
    assert objects
    assert whole.host.run("ls /var/lib/appliance/store/objects").out == objects
    assert whole.host.run("ss -ltnH sport = :8000").out == ""


def test_case_066_installed_again_beside_a_busy_port_it_waits_for_it(whole: Node) -> None:
    """apt ends with 0, the status names the port; when it is free the service serves what it had, without quantizing."""
    holder = whole.host.popen(["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1)
    whole.install("appliance")
    deadline = time.monotonic() + 60
    while "8000" not in whole.reason():
        assert time.monotonic() < deadline, whole.reason()
        time.sleep(0.5)
    whole.host.kill_command(holder)
    holder.wait(10)
    began = time.monotonic()
    whole.wait_ready(READY_S)
    assert whole.answers_paris()
    times.record(case="packages: installed again, port busy at first", fault="-", sentence=whole.reason(), answered_s=time.monotonic() - began)
    assert "quantizing" not in whole.host.run(["journalctl", "-u", UNIT, "-b", "--since", "-5min", "-o", "cat"]).out.split("ready:")[-2]


def test_without_its_worker_the_service_says_so(whole: Node) -> None:
    whole.apt("remove", "appliance-worker").ok()
    assert whole.wait_unit(["failed"], 60) == "failed"
    assert "worker" in whole.reason()
    whole.install("appliance-worker")  # and comes back by itself
    whole.wait_ready(READY_S)


def test_purged_nothing_is_left(whole: Node) -> None:
    whole.apt("purge", *ALL).ok()
    left = [path for path in whole.files() if "appliance" in path and not path.startswith(("/etc/apt/", "/etc/systemd/system/appliance.service.d", "/srv/"))]
    assert left == []
    assert whole.processes() == []
