"""The support bundle: a sentinel secret in every place a secret may be, and in none of its bytes; order, modes, bounds."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from appliance import bundle
from appliance.bundle import Member
from appliance.errors import StoreError, UsageError
from appliance.identity import identity
from appliance.scrub import Scrubber
from appliance.unit import parse

SECRET = "Zq8sentinelVx2mR7"
UNIT = "LoadState=loaded\nActiveState=active\nFragmentPath={folder}/appliance.service\nDropInPaths={folder}/a.conf\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the sentinel in every place where a secret, or somebody's words, may be."""
    state, run = tmp_path / "state", tmp_path / "run"
    for folder in (state, run, tmp_path / "store/names"):
        folder.mkdir(parents=True)
    (tmp_path / "key").write_text(f"key-{SECRET}\n")
    (tmp_path / "tls.key").write_text(f"-----BEGIN PRIVATE KEY-----\nMIIE{SECRET}AAAA\nBBBB{SECRET}CC\n-----END PRIVATE KEY-----\n")
    (tmp_path / "tls.crt").write_text("x")
    (tmp_path / "appliance.yaml").write_text(
        f"# password: {SECRET}\napi_key_file: {tmp_path}/key\ntls: {{cert: {tmp_path}/tls.crt, key: {tmp_path}/tls.key}}\n"
        f"worker: {{env: {{FOO: '{SECRET}', OMP_NUM_THREADS: '2'}}, extra_args: ['--x=https://u:{SECRET}@proxy/']}}\nlisen: {SECRET}\n")
    (state / "keys.json").write_text(json.dumps({"schema": 1, "keys": [
        {"id": "ab", "name": "n", "sha256": hashlib.sha256(SECRET.encode()).hexdigest(), "created_at": "x"}]}))
    (state / "record.json").write_text(json.dumps({
        "schema": 1, "last_word": {"at": 1, "state": "failed", "sentence": f"failed: key-{SECRET} is wrong", "exit_code": 78},
        "good": {"settings": {"worker.env": {"FOO": SECRET}}}}))
    (state / "agent.log").write_text(f"2026-01-01T00:00:00 asked with Authorization: Bearer {SECRET}\nplain line\n")
    (state / "worker.log").write_text(
        f"INFO prompt: 'who is {SECRET}?'\n{{'messages': [{{'content': '{SECRET}'}}]}}\nFOO={SECRET}\nERROR https://me:{SECRET}@host/ refused\nsk-{SECRET}\nengine started\n")
    (state / "worker.log.1").write_text(f"hf_{SECRET}\n")
    (run / "status.json").write_text(json.dumps({"schema": 1, "agent": identity(), "state": "ready", "ready": True, "sentence": f"ready {SECRET[:0]}",
                                                 "warnings": [f"key-{SECRET} is old"]}))
    return tmp_path


def run(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "APPLIANCE_HOME": str(home), "HOME": "/", "APPLIANCE_CONFIG": str(home / "appliance.yaml"),
                   "HF_TOKEN": f"tok{SECRET}", "APPLIANCE_API_KEY": f"env{SECRET}", **env}
    return subprocess.run([sys.executable, "-m", "appliance.cli.main", "support-bundle", *args], env=environment, capture_output=True,
                          text=True, timeout=120, check=False, cwd=home)


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {entry.name: (tar.extractfile(entry) or io.BytesIO()).read() for entry in tar.getmembers()}


def test_case_062_no_secret_and_no_prompt_is_in_it(home: Path) -> None:
    done = run(home, "b.tar.gz")
    assert done.returncode == 0, done.stderr
    found = contents(home / "b.tar.gz")
    for name, data in found.items():
        assert SECRET.encode() not in data, name
        assert hashlib.sha256(SECRET.encode()).hexdigest().encode() not in data, name
    assert SECRET.encode() not in gzip.decompress((home / "b.tar.gz").read_bytes())
    assert SECRET not in done.stdout
    worker_log = found["appliance-support/logs/worker.log"].decode()
    assert "engine started" in worker_log
    assert "who is" not in worker_log
    assert "plain line" in found["appliance-support/logs/agent.log"].decode()
    settings = json.loads(found["appliance-support/settings.json"])
    assert settings["settings"]["worker.env"] == {"FOO": "[hidden]", "OMP_NUM_THREADS": "2"}
    assert settings["settings"]["api_key_file"] == f"{home}/key"


def test_the_index_is_true_and_the_file_private(home: Path) -> None:
    done = run(home, "b.tar.gz")
    assert (home / "b.tar.gz").stat().st_mode & 0o777 == 0o600
    found = contents(home / "b.tar.gz")
    index = json.loads(found.pop("appliance-support/index.json"))
    assert [f"appliance-support/{one['name']}" for one in index["members"]] == list(found) == sorted(found)
    for one in index["members"]:
        assert hashlib.sha256(found[f"appliance-support/{one['name']}"]).hexdigest() == one["sha256"]
        assert f"  {one['name']}\n" in done.stdout
    assert {"doctor.json", "status.json", "record.json", "settings.json", "probe.json", "plan.json", "versions.json", "models.json", "disks.json",
            "host/limits.json", "logs/agent.log", "logs/worker.log", "logs/worker.log.1"} <= {one["name"] for one in index["members"]}
    assert "not_collected" in json.loads(found["appliance-support/plan.json"]), "no worker and no model: the member says so"


def test_an_existing_file_is_not_replaced(home: Path) -> None:
    (home / "b.tar.gz").write_text("mine")
    done = run(home, "b.tar.gz")
    assert (done.returncode, (home / "b.tar.gz").read_text()) == (2, "mine")
    assert run(home, "no/such/folder/b.tar.gz").returncode == 73


def test_a_broken_configuration_is_a_member_not_a_crash(home: Path) -> None:
    (home / "appliance.yaml").write_text("listen: {port: many}\n")
    assert run(home, "b.tar.gz").returncode == 0
    found = contents(home / "b.tar.gz")
    assert "listen.port has a wrong value" in json.loads(found["appliance-support/settings.json"])["not_collected"]
    assert "config-wrong" in found["appliance-support/doctor.json"].decode()


def test_the_same_members_make_the_same_bytes_whatever_their_order(tmp_path: Path) -> None:
    members = [Member(name=name, data=name.encode()) for name in ("b", "a", "logs/z")]
    one = bundle.write(tmp_path / "1", members, now=5.0, version="1")
    two = bundle.write(tmp_path / "2", members[::-1], now=5.9, version="1")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert [member.name for member in one.members] == ["index.json", "a", "b", "logs/z"]
    assert one.bytes == two.bytes


def test_what_is_too_much_is_left_out_oldest_logs_first(tmp_path: Path) -> None:
    block = os.urandom(bundle.MAX_BYTES // 3)
    members = [Member(name=name, data=block) for name in ("logs/worker.log.1", "logs/worker.log", "logs/agent.log")] + [Member(name="status.json", data=b"x" * 9)]
    written = bundle.write(tmp_path / "b", members, now=0, version="1")
    assert written.left_out == ("logs/worker.log.1",)
    assert written.bytes < bundle.MAX_BYTES * 1.01
    with pytest.raises(UsageError, match="is there already"):
        bundle.write(tmp_path / "b", [], now=0, version="1")
    with pytest.raises(StoreError):
        bundle.write(tmp_path / "no/b", [], now=0, version="1")


def test_logs_are_cut_at_a_line(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text("".join(f"line {n}\n" for n in range(1000)))
    assert bundle.tail(log, 25) == "line 998\nline 999\n"
    assert bundle.tail(log, 10**6).startswith("line 0\n")


def test_unit_files_and_drop_ins_are_in_it_without_values(tmp_path: Path) -> None:
    (tmp_path / "appliance.service").write_text("[Service]\nWatchdogSec=30\n")
    (tmp_path / "a.conf").write_text(f"[Service]\nEnvironment=FOO={SECRET}\nMemoryMax=6G\n")
    unit = parse("appliance.service", UNIT.format(folder=tmp_path))
    found = {member.name: member.data.decode() for member in bundle.unit_members(unit, Scrubber())}
    assert SECRET not in "".join(found.values())
    assert any("MemoryMax=6G" in text for text in found.values())
    assert {"systemd/show.txt", "systemd/version.txt", "logs/journal.txt"} <= set(found)
    assert list(bundle.unit_members(None, Scrubber())) == []
