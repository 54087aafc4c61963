"""systemd's unit as a value, and systemctl as a child: a script in its place says what the real one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance import unit
from appliance.errors import ApplianceError, ConfigError, NotReachable

SHOWN = """LoadState=loaded
ActiveState=failed
SubState=failed
Result=exit-code
ExecMainCode=1
ExecMainStatus=78
NRestarts=2
MemoryMax=6442450944
MemoryHigh=infinity
FragmentPath=/usr/lib/systemd/system/appliance.service
DropInPaths=/etc/systemd/system/appliance.service.d/a.conf /etc/systemd/system/appliance.service.d/b.conf
UnitFileState=enabled
NeedDaemonReload=yes
"""


def test_what_systemctl_show_says() -> None:
    found = unit.parse("appliance.service", SHOWN)
    assert found is not None
    assert (found.active, found.exit_status, found.killed_by) == ("failed", 78, None)
    assert (found.memory_max_bytes, found.memory_high_bytes) == (6 << 30, None)
    assert len(found.drop_ins) == 2
    assert found.needs_reload
    assert found.sentence() == "appliance.service is failed (exit-code, exit status 78, restarted 2 times)"


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"ActiveState": "active", "Result": "success", "NRestarts": "0"}, "appliance.service is active"),
    ({"ExecMainCode": "2", "ExecMainStatus": "6", "Result": "watchdog", "NRestarts": "1"}, "appliance.service is failed (watchdog, signal 6, restarted once)"),
    ({"ActiveState": "activating", "SubState": "auto-restart", "ExecMainStatus": "75", "NRestarts": "0"},
     "appliance.service is activating (exit-code, exit status 75, waits for its restart)"),
    ({"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0", "NRestarts": "0"}, "appliance.service is inactive"),
])
def test_its_state_in_a_few_words(changes: dict[str, str], sentence: str) -> None:
    lines = [line for line in SHOWN.splitlines() if line.split("=")[0] not in changes] + [f"{k}={v}" for k, v in changes.items()]
    found = unit.parse("appliance.service", "\n".join(lines))
    assert found is not None
    assert found.sentence() == sentence


@pytest.mark.parametrize("text", ["", "nonsense", "LoadState=loaded\nNRestarts=x"])
def test_no_words_is_no_unit(text: str) -> None:
    assert unit.parse("appliance.service", text) is None


class FakeSystemctl:
    def __init__(self, folder: Path, body: str) -> None:
        self.log = folder / "calls"
        script = folder / "systemctl"
        script.write_text(f'#!/bin/sh\necho "$@" >> {self.log}\n{body}\n')
        script.chmod(0o755)
        self.env = {"PATH": f"{folder}:/usr/bin:/bin"}

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def test_without_systemd_there_is_no_unit(tmp_path: Path) -> None:
    systemctl = FakeSystemctl(tmp_path, "exit 1")
    assert unit.read(env=systemctl.env, booted=tmp_path / "no") is None
    assert systemctl.calls() == []
    assert unit.read(env={"PATH": "/nonexistent"}, booted=tmp_path) is None
    assert unit.read(env=FakeSystemctl(tmp_path, "echo LoadState=not-found; echo ActiveState=inactive").env, booted=tmp_path) is None


def test_who_manages_the_service(tmp_path: Path) -> None:
    env = FakeSystemctl(tmp_path, f"cat <<'END'\n{SHOWN}END").env

    def found(status: dict[str, object] | None, runtime: str, **more: str) -> str | None:
        managed = unit.managing(status, runtime=Path(runtime), env={**env, **more}, booted=tmp_path)
        return managed.name if managed else None

    assert found({"managed_by": "systemd", "unit": "appliance@b.service"}, "/run/x") == "appliance@b.service"
    assert found({"managed_by": None}, "/run/appliance") is None
    assert found(None, "/run/appliance") == "appliance.service"
    assert found(None, "/home/me/.run") is None
    assert found(None, "/run/appliance", APPLIANCE_HOME="/x") is None


def test_case_059_start_clears_a_start_limit_that_was_hit(tmp_path: Path) -> None:
    systemctl = FakeSystemctl(tmp_path, "exit 0")
    unit.act("start", "appliance.service", env=systemctl.env)
    assert systemctl.calls() == ["reset-failed appliance.service", "--no-block --no-ask-password start appliance.service"]
    systemctl.log.unlink()
    unit.act("stop", "appliance.service", env=systemctl.env)
    assert systemctl.calls() == ["--no-block --no-ask-password stop appliance.service"]


@pytest.mark.parametrize(("said", "kind", "line"), [
    ("Failed to start appliance.service: Interactive authentication required.", NotReachable, "run `sudo applianctl start`"),
    ("Failed to start appliance.service: Access denied", NotReachable, "run `sudo applianctl start`"),
    ("Failed to start appliance.service: Unit appliance.service is masked.", ConfigError, "is masked"),
    ("Failed to connect to bus: No such file", NotReachable, "Failed to connect to bus"),
])
def test_a_refusal_is_one_line(said: str, kind: type[ApplianceError], line: str, tmp_path: Path) -> None:
    systemctl = FakeSystemctl(tmp_path, f"echo '{said}' >&2; exit 1")
    with pytest.raises(kind, match=line):
        unit.act("start", "appliance.service", env=systemctl.env)


def test_a_systemctl_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    systemctl = FakeSystemctl(tmp_path, "exec sleep 30")
    with pytest.raises(NotReachable, match="more than 0 s"):
        unit.act("stop", "appliance.service", env=systemctl.env, timeout_s=0.3)
