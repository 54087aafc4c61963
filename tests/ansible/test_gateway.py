"""Role and playbook `gateway`: HAProxy in front of two nodes, put up by Ansible, under load while nodes are being hurt.

The tests share one gateway and two nodes with the fake worker; test_served_gateway.py has the load with real vLLM.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ansible import balanced
from tests.ansible.balanced import NODES, Balanced, hurt_under_load
from tests.ansible.conftest import ONE, TWO
from tests.ansible.fleet import KEY_TEXT, note, sources
from tests.system.testhost.host import Host

SETTINGS = {
    "listen": {"host": "0.0.0.0"}, "drain_s": 20, "trial_s": 5, "probe_s": 2, "max_running": 4, "memory": {"reserve": "64M"},
    "worker": {"env": {"FAKE_CONTROL": "/run/fake", "FAKE_TOKEN_S": "0.03", "FAKE_LOAD_S": "3", "FAKE_PREFILL_S": "0.02"}}}
DRILLS: list[tuple[balanced.Hurt, int]] = [
    # what is done to n1, and how many answers that had begun may be cut by it (it computes 4 at once)
    (balanced.drain, 0), (balanced.restart, 0), (balanced.upgrade, 0), (balanced.reboot, 0), (balanced.freeze, 0),
    (balanced.kill_worker, 4), (balanced.kill_engine, 4), (balanced.kill_agent, 4), (balanced.kill_host, 4), (balanced.powercut, 4), (balanced.cut_network, 4),
]


@pytest.fixture(scope="module")
def published(stand_ins: Path) -> Path:
    return stand_ins


@pytest.fixture(scope="module")
def variables(published: Path) -> dict[str, Any]:
    return {**sources(published), "appliance_config": SETTINGS, "appliance_api_key": KEY_TEXT, "appliance_wait_s": 120,
            "rollout_bench_tokens": 24, "rollout_loss_pct": 90, "rollout_kept": "none"}


@pytest.fixture(scope="module")
def fresh(haproxy: Path, serving: str, published: Path, variables: dict[str, Any], make_host: Callable[..., Host],
          tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balanced]:
    """Two nodes that serve, and a host that is no gateway yet."""
    with balanced.balanced(tmp_path_factory.mktemp("gateway"), make_host, haproxy, serving, published, variables) as made:
        yield made


@pytest.fixture(scope="module")
def gateway(fresh: Balanced) -> Balanced:
    """The same after its first run, which begins with a check run."""
    before = fresh.gateway.run("find / -xdev -newer /etc/hostname -type f -not -path '/var/log/*' -not -path '/root/*' | sort").out
    checked = fresh.put_up("--check", "--diff").ok()
    assert checked.changed == 0
    assert "would install haproxy" in checked.out
    after = fresh.gateway.run("find / -xdev -newer /etc/hostname -type f -not -path '/var/log/*' -not -path '/root/*' | sort").out
    assert after == before
    fresh.put_up().ok()
    for name in NODES:
        fresh.wait_for(name, "UP")
    return fresh


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> None:
    """Each test begins with two nodes that are in."""
    if "gateway" in request.fixturenames:
        made: Balanced = request.getfixturevalue("gateway")
        for name in NODES:
            made.wait_for(name, "UP", timeout_s=60)


def test_case_069_and_071_a_second_run_changes_nothing(gateway: Balanced) -> None:
    pid, config = gateway.main_pid(), gateway.config()
    assert gateway.put_up("--check").ok().changed == 0
    assert gateway.put_up().ok().changed == 0
    assert (gateway.main_pid(), gateway.config()) == (pid, config)


@pytest.mark.parametrize("extra", [{"gateway_bind_address": "no such address"}, {"gateway_port": 70000}])
def test_a_configuration_that_haproxy_refuses_changes_nothing(gateway: Balanced, extra: dict[str, object]) -> None:
    pid, config = gateway.main_pid(), gateway.config()
    ran = gateway.put_up(**extra)
    assert ran.recap["gw"].failed == 1
    assert (gateway.main_pid(), gateway.config()) == (pid, config)
    assert gateway.load().ask().kind == "answered"


def test_the_configuration_of_somebody_else_is_not_replaced(gateway: Balanced) -> None:
    ours = gateway.config()
    foreign = "# our own proxy\n" + ours.partition("\n")[2]
    gateway.gateway.write(balanced.CONFIG, foreign)
    for extra in ({}, {"gateway_state": "absent"}):
        assert "is neither this role's nor the package's" in gateway.put_up(**extra).refusals()["gw"]
        assert gateway.config() == foreign
    gateway.put_up(gateway_replace=True).ok()
    assert gateway.config() == ours
    assert gateway.gateway.run(f"cat {balanced.CONFIG}.*").out == foreign
    gateway.gateway.run(f"rm {balanced.CONFIG}.*", check=True)


def test_a_key_of_another_certificate_changes_nothing(gateway: Balanced, tmp_path: Path) -> None:
    _, other = balanced.certificates(tmp_path, gateway.gateway.ip)
    before = gateway.gateway.run(["sha256sum", "/etc/haproxy/appliance/front.pem"]).out
    ran = gateway.put_up(gateway_tls_key=other.read_text())
    assert ran.recap["gw"].failed == 1
    assert other.read_text().splitlines()[1] not in ran.out
    assert gateway.gateway.run(["sha256sum", "/etc/haproxy/appliance/front.pem"]).out == before


@pytest.mark.parametrize(("extra", "sentence"), [
    ({"gateway_tls_cert": ""}, "no certificate"), ({"gateway_group": "nobody"}, "there is no node"),
    ({"gateway_node_tls": True}, "gateway_node_ca is empty"),
])
def test_what_cannot_work_is_refused_in_one_line(gateway: Balanced, extra: dict[str, object], sentence: str) -> None:
    assert sentence in gateway.put_up(**extra).refusals()["gw"]


def test_a_change_is_a_reload_that_cuts_nothing(gateway: Balanced) -> None:
    pid = gateway.main_pid()
    with gateway.load() as load:
        time.sleep(2)
        ran = gateway.put_up(gateway_max_connections=1999).ok()
        time.sleep(2)
    assert ran.changes() == ["appliance.fleet.gateway : Write the configuration", "appliance.fleet.gateway : Reload HAProxy"]
    assert gateway.main_pid() == pid
    assert load.kinds() == {"answered": len(load.ends)}


def test_the_key_is_passed_on_and_written_nowhere(gateway: Balanced) -> None:
    load = gateway.load(prompt="sentinel-prompt")
    assert load.ask().kind == load.ask(stream=True).kind == "answered"
    load.key = "sk-appl-wrong"
    assert load.ask().detail.startswith("401")
    journal = gateway.gateway.run(["journalctl", "--no-pager"]).out
    assert '"POST /v1/completions"' in journal
    assert KEY_TEXT not in journal
    assert "sk-appl-wrong" not in journal
    assert "sentinel-prompt" not in journal


@pytest.mark.parametrize(("path", "status"), [
    ("/livez", 200), ("/readyz", 200), ("/v1/models", 200), ("/v1/models/default", 200), ("/status", 404), ("/metrics", 404), ("/control/stop", 404),
])
def test_paths(gateway: Balanced, path: str, status: int) -> None:
    assert curl(gateway, path, "-H", f"Authorization: Bearer {KEY_TEXT}")[0] == status


@pytest.mark.parametrize(("words", "works"), [
    (("--tls-max", "1.1"), False), (("--tlsv1.2", "--tls-max", "1.2"), True), (("--tlsv1.3",), True), (("--http2",), True),
])
def test_tls(gateway: Balanced, words: tuple[str, ...], works: bool) -> None:
    assert (curl(gateway, "/livez", *words)[0] == 200) == works


def test_a_client_that_goes_ends_its_work(gateway: Balanced) -> None:
    load = gateway.load(limit_s=1.0)
    assert load.ask(tokens=400).kind == "silence"
    deadline = time.monotonic() + 3
    while any(gateway.node(name).status()["running"] for name in NODES):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_full_fleet_says_when_to_come_back(gateway: Balanced) -> None:
    """2 x (4 + 16) at the nodes less one place each, 32 waiting here: of 90 some are refused, none is lost."""
    with gateway.load(count=90, tokens=(30, 31)) as load:
        time.sleep(6)
    assert set(load.kinds()) == {"answered", "refused"}
    assert {end.detail[:3] for end in load.ends if end.kind == "refused"} == {"429"}


def test_a_request_that_is_too_large_to_be_sent_again_is_answered(gateway: Balanced, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"model": "default", "prompt": "x", "max_tokens": 2' + " " * 1_000_000 + "}")
    assert curl(gateway, "/v1/completions", "-H", f"Authorization: Bearer {KEY_TEXT}", "-H", "Content-Type: application/json", "--data-binary", f"@{body}")[0] == 200


@pytest.mark.parametrize(("hurt", "begun"), DRILLS)
def test_load_while_a_node_is_hurt(gateway: Balanced, hurt: balanced.Hurt, begun: int) -> None:
    """No answer that had not begun is lost, and no more than those of the node that had."""
    load = hurt_under_load(gateway, hurt, drill=f"gateway: {hurt.__name__}")
    assert load.lost(unbegun=True) == []
    assert len(load.lost()) <= begun, load.lost()
    assert load.kinds().get("refused", 0) == 0  # eight users have room on the other node
    assert load.longest_gap_s() < 5


def test_load_while_a_rollout_upgrades_both_nodes(gateway: Balanced) -> None:
    """The second node goes once the first one is back: nobody waits longer for it than for one node that restarts."""
    gateway.node("n1").apt("install", "--allow-downgrades", f"appliance={ONE}", f"appliance-worker={ONE}").ok()
    gateway.node("n1").wait_for(lambda status: status.get("ready") and not status.get("trial"), 60, "kept")
    gateway.wait_for("n1", "UP")
    with gateway.load() as load:
        ran = gateway.play("rollout.yml", appliance_version=TWO).ok()
        gateway.wait_for("n2", "UP")
    note("gateway: a rollout of both nodes under load", ran)
    balanced.keep("gateway: the load while a rollout upgrades both nodes", load)
    assert load.lost() == []
    assert load.kinds().get("refused", 0) == 0
    assert load.longest_gap_s() < 10


def test_without_a_node_it_says_when_to_come_back(gateway: Balanced) -> None:
    for name in NODES:
        gateway.node(name).host.run(["systemctl", "stop", "appliance"], check=True)
    for name in NODES:
        gateway.wait_for(name, "DOWN")
    assert curl(gateway, "/livez")[0] == 200
    status, _, body = curl(gateway, "/readyz")
    assert (status, body) == (503, "no-node\n")
    end = gateway.load().ask()
    assert end.kind == "refused"
    assert json.loads(end.detail[4:])["error"]["code"] == "no_node"
    assert gateway.put_up(gateway_verify_s=2).refusals()["gw"].startswith("the gateway runs and has no ready node (no-node)")
    for name in NODES:
        gateway.node(name).begin()


def test_it_goes_again(gateway: Balanced) -> None:
    gateway.put_up(gateway_state="absent").ok()
    left = gateway.gateway.run("ls -d /etc/haproxy/haproxy.cfg /etc/haproxy/appliance; pgrep haproxy").out
    assert left == ""
    assert gateway.put_up(gateway_state="absent").ok().changed == 0
    gateway.put_up().ok()


def curl(gateway: Balanced, path: str, *words: str) -> tuple[int, str, str]:
    url = f"https://{gateway.gateway.ip}:{balanced.PORT}{path}"
    done = subprocess.run(["curl", "-s", "-i", "-m", "10", "--cacert", str(gateway.folder / "front.crt"), *words, url], capture_output=True, text=True, check=False)
    head, _, body = done.stdout.replace("\r\n", "\n").partition("\n\n")
    return int(head.split()[1]) if done.returncode == 0 else 0, head, body
