"""The operator's commands on a real systemd: as root, as a member of the service's group, as anybody."""

from __future__ import annotations

import json
import time

import pytest

from tests.system.installation import FAKE_SETTINGS
from tests.system.service import UNIT, Service


def test_the_state_at_a_glance_and_a_clean_bill_of_health(running: Service) -> None:
    shown = running.control("status")
    assert shown.rc == 0
    assert shown.out.startswith("ready: serving tiny\n")
    assert f"  service       {UNIT}, systemd\n" in shown.out
    assert "None" not in shown.out
    time.sleep(1)
    found = json.loads(running.control("doctor", "--json").out)
    # The fake worker has torch's kernels only and no layout; a test host has its own ways.
    known = {"no-native-kernels", "not-laid-out", "two-agents", "cpu-masked", "disk-low", "not-enabled"}
    assert [one for one in found if one["id"] not in known] == []


def test_start_stop_restart_by_systemd(service: Service) -> None:
    assert service.control("status").rc == 69
    started = service.control("start")
    assert (started.rc, started.out.splitlines()[-1]) == (0, "ready: serving tiny"), started
    assert service.state() == "active"
    before = service.agent()
    restarted = service.control("restart")
    assert (restarted.rc, restarted.out.splitlines()[-1]) == (0, "ready: serving tiny"), restarted
    assert service.agent() != before
    drained = service.control("drain")
    assert (drained.rc, drained.out.splitlines()[-1]) == (0, "drained: no request runs"), drained
    assert service.ask()[0] == 503
    assert service.control("start").rc == 0
    assert service.ask()[0] == 200
    assert service.control("reload").rc == 0
    service.wait_ready()
    stopped = service.control("stop")
    assert (stopped.rc, stopped.out.splitlines()[-1]) == (0, "stopped: no agent runs"), stopped
    assert service.state() == "inactive"
    assert service.control("stop").out == "not running\n"
    said = service.control("status")
    assert said.rc == 69
    assert said.out.startswith("stopped: no worker process is left; run `applianctl start`\n")


def test_case_059_a_configuration_error_is_followed_to_its_exit_code(service: Service) -> None:
    service.write_settings("listen: {port: many}\n")
    began = time.monotonic()
    done = service.control("start")
    assert done.rc == 78, done
    assert "listen.port" in done.err
    assert time.monotonic() - began < 15
    doctor = service.control("doctor")
    assert doctor.rc == 78
    assert "[config-wrong]" in doctor.out
    assert "[stopped-by-fault]" in doctor.out
    assert "by a configuration error (exit 78)" in service.control("status").out
    service.write_settings(FAKE_SETTINGS)
    assert service.control("start").rc == 0


@pytest.mark.parametrize("who", ["nobody", "clerk"])
def test_what_an_ordinary_account_may(who: str, running: Service) -> None:
    if who == "clerk":
        running.host.run("useradd -M -G appliance clerk", check=True)
    run = running.host.run
    assert run(["applianctl", "status"], user=who).out.startswith("ready: serving tiny\n")
    doctor = run(["applianctl", "doctor"], user=who)
    assert doctor.rc == 0, doctor
    assert "Traceback" not in doctor.out + doctor.err
    refused = run(["applianctl", "stop"], user=who)
    assert refused.rc == 69
    assert "run `sudo applianctl stop`" in refused.err
    assert len(refused.err.splitlines()) == 1
    chat = run(["applianctl", "chat", "hello"], user=who)
    assert chat.rc == 0, chat
    assert chat.out.strip()
    bundle = run("cd /tmp && applianctl support-bundle mine-$(id -un).tar.gz", user=who)
    assert bundle.rc == 0, bundle
    drained = run(["applianctl", "drain"], user=who)
    if who == "clerk":
        assert chat.err == ""
        assert drained.rc == 0, drained
    else:
        assert "is not open to this account" in chat.err
        assert drained.rc == 69
        assert "[not-seen]" in doctor.out
        logs = run(["applianctl", "logs"], user=who)
        assert (logs.rc, len(logs.err.splitlines())) == (69, 1)
        assert "sudo" in logs.err


def test_an_ordinary_account_beside_settings_that_are_closed(running: Service) -> None:
    """0640, as the Ansible role leaves settings that may hold a secret: what needs them says so in one line."""
    running.host.run("chown root:appliance /etc/appliance/appliance.yaml && chmod 640 /etc/appliance/appliance.yaml", check=True)
    run = running.host.run
    shown = run(["applianctl", "status"], user="nobody")
    assert (shown.rc, shown.err, shown.out.splitlines()[0]) == (0, "", "ready: serving tiny")
    assert [line.split()[0] for line in shown.out.splitlines()[1:]].count("address") == 1
    assert shown.out.splitlines()[1:3] == running.control("status").out.splitlines()[1:3]
    assert json.loads(run(["applianctl", "status", "--json"], user="nobody").out)["ready"] is True
    chat = run(["applianctl", "chat", "hello"], user="nobody")
    assert (chat.rc, bool(chat.out.strip())) == (0, True), chat
    doctor = run(["applianctl", "doctor"], user="nobody")
    assert doctor.rc == 0, doctor
    assert "[config-not-seen]" in doctor.out
    for words in (["plan"], ["config", "check"], ["config", "show"], ["tune"], ["apply", "--set", "max_queued=3"], ["model", "list"]):
        refused = run(["applianctl", *words], user="nobody")
        assert (refused.rc, refused.out) == (78, ""), (words, refused)
        assert refused.err == ("applianctl: /etc/appliance/appliance.yaml cannot be read: Permission denied; let this account's group read it, "
                               "or run the command with sudo\n"), words
    assert running.control("stop").rc == 0
    stopped = run(["applianctl", "status"], user="nobody")
    assert (stopped.rc, stopped.err) == (69, "")
    assert stopped.out.startswith("stopped: no worker process is left; run `applianctl start`\n")


def test_logs_and_journal(running: Service) -> None:
    assert "ready: http://127.0.0.1:8000/v1 answered" in running.control("logs").out
    assert "applianctl" in running.control("logs", "--journal", "-n", "20").out
    assert running.control("logs", "--worker", "-n", "1").out.count("\n") == 1


def test_the_bundle_has_the_unit_its_drop_ins_and_its_journal(running: Service) -> None:
    running.host.run("mkdir -p /etc/systemd/system/appliance.service.d && "
                     "printf '[Service]\\nEnvironment=FOO_TOKEN=Zq8sentinelVx2\\n' >/etc/systemd/system/appliance.service.d/a.conf && "
                     "systemctl daemon-reload", check=True)
    done = running.control("support-bundle", "/root/b.tar.gz")
    assert done.rc == 0, done
    listed = running.host.run("cd /root && tar -tzf b.tar.gz && tar -xzf b.tar.gz").out
    for name in ("systemd/usr_lib_systemd_system_appliance.service", "systemd/etc_systemd_system_appliance.service.d_a.conf", "systemd/show.txt",
                 "logs/journal.txt", "logs/agent.log", "logs/worker.log", "plan.json", "probe.json"):
        assert f"appliance-support/{name}" in listed, listed
    assert running.host.run("grep -r Zq8sentinelVx2 /root/appliance-support").rc == 1
    assert running.host.run("zcat /root/b.tar.gz | grep -c Zq8sentinelVx2").out.strip() == "0"
    assert "FOO_TOKEN=[hidden]" in running.host.run("cat /root/appliance-support/systemd/etc*a.conf").out
    assert running.host.run("stat -c %a /root/b.tar.gz").out.strip() == "600"
    assert "not_collected" not in running.host.run("cat /root/appliance-support/plan.json").out
