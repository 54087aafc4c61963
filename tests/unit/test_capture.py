"""A captured host: the same facts as live, and nothing that names the machine or who uses it."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from appliance.cli.main import cli
from appliance.errors import UsageError
from appliance.facts import to_json
from appliance.probe.capture import RecordingTree, capture, kept, names_of
from appliance.probe.host import read_host
from tests.unit.test_probe_hosts import differences, observed

VERSIONS = {"appliance": "1", "torch": "2.13.0+cpu"}
MOVING = ("available_bytes", "used_bytes", "store_free_bytes", "shm_free_bytes")
"""What changes from one moment to the next."""


def still(facts: Any) -> Any:
    """The facts without what moves, and sources of limits without names of groups."""
    if isinstance(facts, dict):
        return {key: still(value) for key, value in facts.items() if key not in MOVING}
    if isinstance(facts, list):
        return [still(value) for value in facts]
    return re.sub(r"/sys/fs/cgroup/.*/", "/sys/fs/cgroup/.../", facts) if isinstance(facts, str) else facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture") / "host"
    capture(folder, store=Path("/nonexistent/store"), versions=VERSIONS, env=os.environ)
    return folder


def test_a_captured_host_has_the_facts_of_the_live_one(folder: Path) -> None:
    live, captured = read_host("/", store=Path("/nonexistent/store"), versions=VERSIONS), read_host(folder)
    assert still(to_json(captured)) == still(to_json(live))
    assert captured.fingerprint == live.fingerprint
    assert captured.memory.used_bytes is not None


def test_it_is_a_test_case_at_once(folder: Path) -> None:
    expected = json.loads((folder / "expect.json").read_text())
    assert expected["memory"]["ceiling_bytes"]
    assert differences(expected, observed(read_host(folder))) == []


def test_the_command_says_what_it_wrote_and_overwrites_nothing(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    run = CliRunner()
    done = run.invoke(cli, ["probe", "--capture", str(target)], env={"APPLIANCE_HOME": str(tmp_path / "home")})
    assert done.exit_code == 0, done.output
    written = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert [line.strip() for line in done.output.splitlines() if line.startswith("  ")] == written
    assert run.invoke(cli, ["probe", "--root", str(target)]).exit_code == 0
    with pytest.raises(UsageError, match="is not empty"):
        capture(target, store=None, versions={}, env={})
    both = run.invoke(cli, ["probe", "--root", str(target), "--capture", str(tmp_path / "other")])
    assert isinstance(both.exception, UsageError)
    assert not (tmp_path / "other").exists()


def test_nothing_names_the_machine(folder: Path) -> None:
    ids = [Path(path).read_text().strip() for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id") if Path(path).exists()]
    groups = re.findall(r"[0-9a-f]{32,}", Path("/proc/self/cgroup").read_text())
    words = [word for word in [socket.gethostname(), *ids, *groups] if len(word) > 5]
    assert words
    for file in folder.rglob("*"):
        text = str(file) + (file.read_bytes().decode("latin-1") if file.is_file() else "")
        assert not [word for word in words if word in text.removeprefix(str(folder))], file


def test_only_files_that_the_probe_read_are_in_it(folder: Path) -> None:
    allowed = re.compile(r"(proc/(cpuinfo|meminfo|self/(cgroup|mountinfo|status)|sys/kernel/osrelease)|sys/.*|etc/ld\.so\.conf\.d/.*"
                         r"|var/lib/dpkg/status|bin/sh|captured\.json|expect\.json)")
    for file in folder.rglob("*"):
        if file.is_file() and not allowed.fullmatch(str(file.relative_to(folder))):
            assert file.read_bytes() == b"", file  # its being there is all that is told


CGROUP = """4:memory:/docker/9b1dd2f0c3a4e5f60718/alice-job.service
0::/user.slice/user-1000.slice/user@1000.service/app.slice/vte-spawn-6f1c.scope
"""
MOUNTS = """36 25 8:1 / /home/alice rw,relatime - ext4 /dev/disk/by-uuid/77ab rw
35 31 0:32 /docker/9b1dd2f0c3a4e5f60718 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
36 31 0:33 /docker/outer-77ab0c /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
"""


def test_names_of_groups_people_and_machines_are_replaced() -> None:
    names = names_of(CGROUP, MOUNTS, machine="edge-berlin-7.example.org", account="alice")
    assert names.path(CGROUP) == (
        "4:memory:/docker/group1/group2.service\n0::/user.slice/user-1000.slice/user@1000.service/app.slice/group3.scope\n")
    assert kept("/proc/self/mountinfo", MOUNTS.encode(), names).decode() == (
        "35 31 0:32 /docker/group1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "36 31 0:33 /docker/group4 /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n")
    assert names.path("/sys/fs/cgroup/memory/docker/9b1dd2f0c3a4e5f60718/memory.max") == "/sys/fs/cgroup/memory/docker/group1/memory.max"
    assert names.path("/home/alice/.local/bin/g++") == "/home/user/.local/bin/g++"
    assert names.path("/srv/alice/models") == "/srv/user/models"
    assert names.path("6.1.0-edge-berlin-7") == "6.1.0-machine"
    assert names_of(CGROUP, MOUNTS, machine="pc", account="root").path("/root/x/pc") == "/root/x/pc"


def test_lines_that_are_not_known_to_be_harmless_go() -> None:
    names = names_of("0::/", "", machine="m", account="")
    cpuinfo = b"processor\t: 0\nmodel name\t: ARM\nSerial\t\t: 10000000abcdef01\n\n"
    assert b"Serial" not in kept("/proc/cpuinfo", cpuinfo, names)
    assert kept("/proc/cpuinfo", cpuinfo, names).startswith(b"processor")
    assert kept("/proc/self/status", b"Name:\tsecret\nUid:\t1000\nCpus_allowed_list:\t0-3\n", names) == b"Cpus_allowed_list:\t0-3\n"
    packages = (b"Package: dpkg\nStatus: install ok installed\nMaintainer: someone <a@b.c>\nArchitecture: amd64\nVersion: 1.21\n\n"
                b"Package: secret-tool\nStatus: install ok installed\nVersion: 1\n")
    kept_packages = kept("/var/lib/dpkg/status", packages, names).decode()
    assert "Architecture: amd64" in kept_packages
    assert "secret-tool" not in kept_packages
    assert "Maintainer" not in kept_packages


def test_the_recording_tree_remembers_what_was_read_and_asked(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").write_text("more")
    tree = RecordingTree(root=tmp_path)
    assert tree.read("/a") == "text"
    assert tree.is_file("/a")
    assert tree.is_file("/b")
    assert not tree.is_file("/c")
    assert tree.seen == {"/a": b"text", "/b": b""}
