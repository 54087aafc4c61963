"""API keys: made, checked, revoked, and what a damaged file means."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from appliance.errors import ConfigError, StoreError, UsageError
from appliance.keys import PREFIX, KeyRing, configured_key
from tests.unit.test_command_line import applianctl


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "state" / "keys.json")


def test_a_key_is_shown_once_and_stored_as_a_hash(ring: KeyRing) -> None:
    assert not ring.required
    key_id, secret = ring.new("laptop")
    assert secret.startswith(PREFIX)
    assert len(secret) >= len(PREFIX) + 43  # 256 bits
    text = ring.file.read_text()
    assert secret not in text
    assert secret.removeprefix(PREFIX) not in text
    assert stat.S_IMODE(ring.file.stat().st_mode) == 0o600
    assert list(ring.file.parent.iterdir()) == [ring.file]
    assert [(key.id, key.name) for key in ring.list()] == [(key_id, "laptop")]
    assert ring.required
    assert ring.accepts(secret)


@pytest.mark.parametrize("change", [
    lambda key: "", lambda key: key[:-1], lambda key: key + "x", lambda key: key.upper(), lambda key: key.removeprefix(PREFIX),
    lambda key: "é" + key, lambda key: "\udcff", lambda key: "x" * 100_000,
])
def test_anything_else_is_no_key(ring: KeyRing, change: object) -> None:
    _, secret = ring.new("")
    assert not ring.accepts(change(secret))  # type: ignore[operator]


def test_the_hash_itself_opens_nothing(ring: KeyRing) -> None:
    ring.new("")
    assert not ring.accepts(ring.list()[0].sha256)


def test_a_running_ring_sees_new_and_revoked_keys(ring: KeyRing) -> None:
    running = KeyRing(ring.file)
    assert not running.required
    first, one = ring.new("one")
    _, two = ring.new("two")
    assert running.accepts(one)
    assert running.accepts(two)
    assert ring.revoke(first).name == "one"
    assert not running.accepts(one)
    assert running.accepts(two)
    with pytest.raises(UsageError):
        ring.revoke(first)
    ring.revoke(ring.list()[0].id)
    assert not running.required


@pytest.mark.parametrize("damage", [
    "", "{", "[]", "{}", '{"schema": 2, "keys": []}', '{"schema": 1, "keys": [{"id": "x"}]}', '{"schema": 1, "keys": "abc"}',
    '{"schema": 1, "keys": [{"id": "a", "name": "", "created_at": "", "sha256": "é"}]}', "\x00", "[" * 100_000,
])
def test_a_damaged_file_never_opens_the_door(ring: KeyRing, damage: str) -> None:
    _, secret = ring.new("")
    running = KeyRing(ring.file)
    assert running.accepts(secret)
    ring.file.write_text(damage)
    assert running.required
    assert running.accepts(secret)  # the keys read before stay
    assert "cannot be read" in (running.warning or "")
    started_now = KeyRing(ring.file)
    assert started_now.required
    assert not started_now.accepts(secret)
    with pytest.raises(StoreError):
        ring.list()
    with pytest.raises(StoreError):
        ring.new("")
    assert ring.file.read_text() == damage  # not overwritten


def test_a_file_that_comes_back_as_it_was_is_no_longer_warned_of(ring: KeyRing, tmp_path: Path) -> None:
    _, secret = ring.new("")
    running = KeyRing(ring.file)
    assert running.accepts(secret)
    aside = ring.file.rename(tmp_path / "aside")
    ring.file.symlink_to(ring.file.name)  # a loop: what is there cannot be looked at
    assert "cannot be read" in (running.warning or "")
    assert running.accepts(secret)
    aside.rename(ring.file)
    assert running.warning is None
    assert running.accepts(secret)


def test_the_configured_key_counts_beside_the_others(ring: KeyRing) -> None:
    _, secret = ring.new("")
    ring.extra = "from-a-file"
    assert ring.accepts("from-a-file")
    assert ring.accepts(secret)
    ring.extra = None
    assert not ring.accepts("from-a-file")


def test_two_programs_making_keys_lose_none(ring: KeyRing) -> None:
    threads = [threading.Thread(target=lambda: KeyRing(ring.file).new("")) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ring.list()) == 20


@pytest.mark.parametrize(("content", "says"), [
    (b"", "first line is empty"), (b"\nlater", "first line is empty"), (b"\xff\xfe", "not text"), (b"a b", "no header"),
    ("schlüssel".encode(), "no header"),
])
def test_case_062_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        configured_key(str(file), {})


def test_case_062_where_the_configured_key_comes_from(tmp_path: Path) -> None:
    assert configured_key(None, {}) is None
    with pytest.raises(ConfigError, match="No such file"):
        configured_key(str(tmp_path / "nothing"), {})
    unit = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert configured_key(None, unit) is None
    (tmp_path / "api_key").write_text("from-the-credential\n")
    assert configured_key(None, unit) == "from-the-credential"
    (tmp_path / "mine").write_text("from-the-setting\nand a comment\n")
    assert configured_key(str(tmp_path / "mine"), unit) == "from-the-setting"


def test_key_new_prints_the_key_alone_on_standard_output(tmp_path: Path) -> None:
    made = applianctl("key", "new", "--name", "gateway", home=tmp_path)
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    assert KeyRing(tmp_path / "state" / "keys.json").accepts(secret)
    listed = applianctl("key", "list", "--json", home=tmp_path)
    [one] = json.loads(listed.stdout)["keys"]
    assert one["name"] == "gateway"
    assert secret not in listed.stdout
    revoked = applianctl("key", "revoke", one["id"], home=tmp_path)
    assert revoked.returncode == 0
    assert "That was the last key" in revoked.stderr
    assert applianctl("key", "revoke", one["id"], home=tmp_path).returncode == 2


def test_expose_makes_a_key_writes_the_file_and_says_what_is_left_to_do(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# ours\nmodel: smollm2  # the small one\n")
    done = applianctl("--config", str(file), "expose", "0.0.0.0", "--port", "9001", home=tmp_path)
    assert done.returncode == 0, done.stderr
    secret = done.stdout.splitlines()[0]
    ring = KeyRing(tmp_path / "state" / "keys.json")
    assert ring.accepts(secret)
    assert "listen.host = 0.0.0.0, listen.port = 9001" in done.stdout
    assert "it listens on 0.0.0.0:9001 from the next start of the agent (`systemctl restart appliance`" in done.stdout
    assert "without TLS" in done.stderr
    assert file.read_text().startswith("# ours\nmodel: smollm2  # the small one\n")
    again = applianctl("--config", str(file), "expose", "0.0.0.0", home=tmp_path)
    assert "nothing to change" in again.stdout
    assert len(ring.list()) == 1
    undone = applianctl("--config", str(file), "expose", "--off", home=tmp_path)
    assert "listen.host = 127.0.0.1" in undone.stdout
    shown = applianctl("--config", str(file), "config", "show", "--json", home=tmp_path)
    assert json.loads(shown.stdout)["settings"]["listen"]["host"] == "127.0.0.1"


@pytest.mark.parametrize(("args", "code"), [
    ((), 2), (("0.0.0.0", "--off"), 2), (("300.1.1.1",), 78), (("a b",), 78), (("0.0.0.0", "--port", "0"), 2),
])
def test_a_wrong_expose_leaves_nothing_behind(tmp_path: Path, args: tuple[str, ...], code: int) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: smollm2\n")
    done = applianctl("--config", str(file), "expose", *args, home=tmp_path)
    assert done.returncode == code, done.stderr
    assert file.read_text() == "model: smollm2\n"
    assert not (tmp_path / "state").exists()


def test_the_key_commands_do_not_load_the_front_door(tmp_path: Path) -> None:
    code = ("import sys\nfrom appliance.cli.main import main\n"
            "try:\n    main(['expose', '--off'])\nexcept SystemExit:\n    pass\n"
            "print('LOADED', [m for m in ('aiohttp', 'asyncio') if m in sys.modules])")
    file = tmp_path / "a.yaml"
    file.write_text("")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "APPLIANCE_HOME": str(tmp_path), "APPLIANCE_CONFIG": str(file)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"
