"""rollout, rollback, status and benchmark on three booted nodes, over SSH; the fake worker serves.

The packages, scripts, unit, agent and trials are the real ones. test_served_fleet.py does the same with real vLLM.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ansible.conftest import DIES, ONE, TWO, embedded
from tests.ansible.fleet import PENDING, Fleet, batches, note, sources, told
from tests.system.testhost.host import Host

STEP_S = 0.02
"""Of the fake worker: 50 tokens a second on any machine."""
SETTINGS = {"trial_s": 5, "drain_s": 5, "probe_s": 2, "memory": {"reserve": "64M"}, "worker": {"env": {"FAKE_TOKEN_S": str(STEP_S)}}}
SLOWER = {**SETTINGS, "worker": {"env": {"FAKE_TOKEN_S": str(3 * STEP_S)}}}
CHEAP = {"rollout_bench_tokens": 24, "rollout_bench_tries": 1, "rollout_loss_pct": 40, "rollout_kept": "none", "fleet_settle_s": 60}


@pytest.fixture(scope="module")
def published(stand_ins: Path) -> Path:
    return stand_ins


@pytest.fixture(scope="module")
def variables(published: Path) -> dict[str, Any]:
    return {**sources(published), "appliance_config": SETTINGS, "appliance_wait_s": 120, **CHEAP}


def test_a_rollout_goes_canary_first_and_says_what_it_did(nodes: Fleet) -> None:
    ran = nodes.play("rollout.yml", appliance_version=TWO, rollout_canary="web2", rollout_batch=1).ok()
    note("a version, one node at a time", ran)
    assert batches(ran) == ["web2", "web1", "web3"]
    assert {name: nodes.version(name) for name in nodes.hosts} == dict.fromkeys(nodes.hosts, TWO)
    after = nodes.all_seen()
    assert all(seen.answers for seen in after.values())
    for name in nodes.hosts:
        record = nodes.record(name)
        assert record["before"]["packages"]["appliance-worker"] == ONE
        assert record["now"]["decode_tok_s"] == pytest.approx(1 / STEP_S, rel=0.4)
        assert not nodes.node(name).file(PENDING).exists()

    again = nodes.play("rollout.yml", appliance_version=TWO, rollout_canary="web2", rollout_batch=1).ok()
    note("the same again", again)
    assert again.changed == 0, again.changes()
    assert {name: seen.worker_pid for name, seen in nodes.all_seen().items()} == {name: seen.worker_pid for name, seen in after.items()}
    assert nodes.record("web1")["before"]["packages"]["appliance-worker"] == ONE  # a run without a change forgets nothing


def test_rollback_brings_back_what_was_or_a_version(nodes: Fleet) -> None:
    before = nodes.all_seen()
    nodes.play("rollout.yml", appliance_version=TWO, rollout_batch=2).ok()
    back = nodes.play("rollback.yml", rollback_batch=3).ok()
    note("rollback of three at once", back)
    assert {name: (seen.version, seen.config, seen.answers) for name, seen in nodes.all_seen().items()} == {
        name: (ONE, seen.config, True) for name, seen in before.items()}
    again = nodes.play("rollback.yml", rollback_batch=3).ok()
    note("rollback again", again)
    assert again.changed == 0, again.changes()
    nodes.play("rollback.yml", rollback_to=TWO, rollback_hosts="web3").ok()
    assert {name: nodes.version(name) for name in nodes.hosts} == {"web1": ONE, "web2": ONE, "web3": TWO}
    assert nodes.seen("web3").answers


def test_a_canary_whose_worker_dies_leaves_the_fleet_as_it_was(nodes: Fleet) -> None:
    before = nodes.all_seen()
    ran = nodes.play("rollout.yml", appliance_version=DIES)
    note("canary whose worker dies", ran)
    sentence = told(ran)
    assert sentence.startswith("rollout stopped at the canary: web1: ")
    assert "this fake always crashes" in sentence or "died" in sentence, sentence
    assert sentence.endswith("as before and well: web1. untouched: web2, web3")
    after = nodes.all_seen()
    assert (after["web2"], after["web3"]) == (before["web2"], before["web3"])  # the same workers too
    assert (after["web1"].version, after["web1"].config, after["web1"].model, after["web1"].answers) == (
        ONE, before["web1"].config, before["web1"].model, True)
    rows = nodes.rows()
    assert {(row["state"], row["version"]) for row in rows.values()} == {("ready", ONE)}
    assert all(row["last answer or error"].startswith("answered ") for row in rows.values())
    assert nodes.record("web1") == {}  # nothing was achieved that one could go back from

    nodes.play("rollout.yml", appliance_version=TWO).ok()  # and the next one is not hindered by it
    assert {nodes.version(name) for name in nodes.hosts} == {TWO}


def test_a_batch_with_a_slow_node_goes_back_whole(nodes: Fleet) -> None:
    """web3 gets settings that make it slow; web2 in the same batch is well and goes back with it, web1 stays."""
    before = nodes.all_seen()
    nodes.own = {"web3": {"appliance_config": SLOWER}}
    ran = nodes.play("rollout.yml", appliance_version=TWO, rollout_batch=2)
    note("second batch with a slow node", ran)
    sentence = told(ran)
    assert sentence.startswith("rollout stopped at a batch: web3: too slow: ")
    assert "the canary's were" in sentence
    assert sentence.endswith("as before and well: web2, web3. passed and stay: web1. untouched: none")
    after = nodes.all_seen()
    assert {name: seen.version for name, seen in after.items()} == {"web1": TWO, "web2": ONE, "web3": ONE}
    assert all(seen.answers for seen in after.values())
    assert {name: seen.config for name, seen in after.items()} == {name: seen.config for name, seen in before.items()}


def test_an_unreachable_node_stops_its_batch_or_is_skipped(nodes: Fleet) -> None:
    nodes.hosts["web3"].poweroff()
    ran = nodes.play("rollout.yml", appliance_version=TWO, rollout_batch=1)
    note("unreachable node in the third batch", ran)
    sentence = told(ran)
    assert "web3: unreachable: " in sentence
    assert sentence.endswith("passed and stay: web1, web2. untouched: web3")
    assert (nodes.version("web1"), nodes.version("web2")) == (TWO, TWO)
    refused = nodes.play("rollout.yml", appliance_version=ONE, rollout_canary="web3", rollout_unreachable="skip")
    assert refused.refusals() == {"web1": "the canary web3 cannot be reached; choose another with rollout_canary"}

    back = nodes.play("rollout.yml", appliance_version=ONE, rollout_unreachable="skip").ok()
    assert "unreachable and skipped: web3" in back.out
    assert (nodes.version("web1"), nodes.version("web2")) == (ONE, ONE)
    rows = nodes.rows()
    assert rows["web3"]["state"] == "unreachable"
    assert rows["web3"]["last answer or error"].startswith("unreachable: ")
    assert (rows["web1"]["state"], rows["web1"]["version"]) == ("ready", ONE)


def test_a_node_that_is_lost_in_the_middle_comes_back_by_rollback(nodes: Fleet) -> None:
    """While dpkg works there."""
    running = nodes.start("rollout.yml", appliance_version=TWO, rollout_batch=2)
    updates = nodes.node("web3").file("/var/lib/dpkg/updates")
    wait_for(lambda: any(updates.glob("[0-9]*")), running)
    nodes.hosts["web3"].powercut()
    out = running.communicate(timeout=300)[0]
    assert running.returncode != 0, out[-3000:]
    assert "web3: unreachable in the middle of its upgrade" in out
    assert "as before and well: web2" in out
    assert (nodes.version("web1"), nodes.version("web2")) == (TWO, ONE)
    nodes.hosts["web3"].boot()
    nodes.play("rollback.yml", "--limit", "web3").ok()
    seen = nodes.seen("web3")
    assert (seen.version, seen.answers) == (ONE, True)


def test_an_interrupted_rollout_goes_on_and_still_knows_the_way_back(nodes: Fleet) -> None:
    running = nodes.start("rollout.yml", appliance_version=TWO, rollout_batch=1)
    wait_for(nodes.node("web2").file(PENDING).exists, running)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    nodes.play("rollout.yml", appliance_version=TWO, rollout_batch=1).ok()
    assert {nodes.version(name) for name in nodes.hosts} == {TWO}
    assert {nodes.record(name)["before"]["packages"]["appliance-worker"] for name in nodes.hosts} == {ONE}
    assert not any(nodes.node(name).file(PENDING).exists() for name in nodes.hosts)


def test_a_first_installation_that_fails_is_taken_off_again(make_host: Callable[..., Host], published: Path, variables: dict[str, Any],
                                                          tmp_path: Path) -> None:
    with make_host(binds=((str(published), "/srv/repository"),)) as host:
        fresh = Fleet(tmp_path, {"web1": host}, **variables)
        sentence = told(fresh.play("rollout.yml", appliance_version=DIES, appliance_wait_s=15))
        assert sentence.endswith("as before and well: web1. untouched: none")
        assert fresh.node("web1").processes() == []
        assert fresh.rows()["web1"]["last answer or error"] == "the appliance is not installed"


def test_new_contents_under_the_name_in_use_go_back_too(make_host: Callable[..., Host], published: Path, variables: dict[str, Any], tmp_path: Path) -> None:
    """By a rollout that fails, and by rollback."""
    gguf = tmp_path / "mine.gguf"
    gguf.write_bytes(embedded().read_bytes())
    with make_host(binds=((str(published), "/srv/repository"),)) as host:
        nodes = Fleet(tmp_path, {"web1": host}, **{**variables, "appliance_version": ONE, "appliance_model": str(gguf)})
        nodes.play().ok()
        before = nodes.seen("web1").model
        head, name, rest = gguf.read_bytes().partition(b"Smollm2 135M")
        gguf.write_bytes(head + b"Smollm9 135M" + rest)
        assert name
        host.run("mkdir -p /run/broken && echo stay >/run/broken/load-ill", check=True)
        sentence = told(nodes.play("rollout.yml", appliance_config={**SETTINGS, "worker": {"env": {"FAKE_CONTROL": "/run/broken"}}}))
        assert sentence.endswith("as before and well: web1. untouched: none"), sentence
        assert (nodes.seen("web1").model, nodes.seen("web1").answers, named(host)) == (before, True, before)

        nodes.play("rollout.yml").ok()
        after = nodes.seen("web1").model
        assert after != before
        assert (nodes.record("web1")["before"]["digest"], nodes.record("web1")["now"]["digest"]) == (before, after)
        assert nodes.play("rollout.yml").ok().changed == 0

        nodes.play("rollback.yml").ok()
        assert (nodes.seen("web1").model, nodes.seen("web1").answers, named(host)) == (before, True, before)


def named(host: Host) -> str:
    """The digest that the name stands for."""
    rows = json.loads(host.run(["applianctl", "model", "list", "--json"], check=True).out)
    return str(next(row["digest"] for row in rows if row["name"] == "mine"))


def test_status_shows_nodes_that_do_not_serve(nodes: Fleet) -> None:
    nodes.hosts["web1"].run(["systemctl", "stop", "appliance"], check=True)
    nodes.hosts["web2"].run("mkdir /root/away && mv /usr/bin/python3* /root/away/", check=True)
    nodes.hosts["web3"].run("useradd -m guest && cp -r /home/admin/.ssh /home/guest/ && chown -R guest: /home/guest", check=True)
    nodes.hosts["web4"], nodes.own = nodes.hosts["web3"], {"web4": {"ansible_user": "guest"}}
    ran = nodes.play("status.yml")
    assert ran.rc == 0, ran.out[-3000:]
    lines = [line.strip().strip('",') for line in ran.out.splitlines() if re.match(r'\s+"(host|web)', line)]
    assert lines[0].split()[0] == "host"
    assert re.match(r"web1\s+stopped ", lines[1])
    assert "applianctl start" in lines[1]
    assert re.match(r"web2\s+unreachable ", lines[2])
    assert re.match(r"web3\s+ready\s+avx", lines[3])
    assert re.match(r"web4\s+unreachable .*  unreachable: Missing sudo password", lines[4])
    assert ran.changed == 0


def test_benchmark_measures_all_but_the_busy(nodes: Fleet) -> None:
    # Three clients without a pause: there is always a request in work.
    body = json.dumps({"model": "default", "prompt": "x", "max_tokens": 400})
    ask = f"curl -s -o /dev/null -H 'content-type: application/json' -d '{body}' http://127.0.0.1:8000/v1/completions"
    busy = nodes.hosts["web2"].popen(f"for n in 1 2 3; do while :; do {ask}; done & done; wait", stdout=subprocess.DEVNULL)
    nodes.node("web2").wait_for(lambda status: status.get("running"), 20, "busy")
    ran = nodes.play("benchmark.yml", benchmark_tokens=16, benchmark_prompt=16, benchmark_streams=2,
                     benchmark_json=str(nodes.folder / "b.json"), benchmark_csv=str(nodes.folder / "b.csv"))
    nodes.hosts["web2"].kill_command(busy)
    busy.wait()
    assert ran.refusals() == {"web1": "not measured: web2; the table says why"}
    rows = {row["host"]: row for row in json.loads((nodes.folder / "b.json").read_text())}
    assert re.fullmatch("busy: [123] requests are running or waiting", rows["web2"]["refused"])
    assert rows["web2"]["decode tok/s"] is None
    for name in ("web1", "web3"):
        assert rows[name]["decode tok/s"] == pytest.approx(1 / STEP_S, rel=0.4)
        assert rows[name]["refused"] == ""
    assert len((nodes.folder / "b.csv").read_text().splitlines()) == 4
    assert ran.changed == 2  # the two files on the controller


def wait_for(test: Callable[[], bool], running: subprocess.Popen[str], timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not test():
        assert running.poll() is None, running.communicate()[0][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
