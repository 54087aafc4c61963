"""Changing keys of a file that people wrote: every other byte stays, and what is not understood is not touched."""

from __future__ import annotations

import difflib
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.configfile import HEADER, edited, read, value_of, write
from appliance.errors import ConfigError, StoreError
from appliance.settings import parse

TEXT = """\
# top
# second line

model: qwen   # the model

# where
listen:
  # port comment
  port: 8080   # eol
  host: 127.0.0.1
# memory section
memory:
  ceiling: 6G
  reserve: 512M  # keep

# last
context: 8192
cpu: {threads: 4}
worker:
  extra_args:
    - --a
    - b
# end
"""


def change(file: Path, changes: dict[str, Any]) -> None:
    """As `apply` and `expose` do it."""
    write(file, edited(read(file), changes, origin=str(file)))


def changed_lines(text: str, changes: dict[str, Any]) -> list[str]:
    diff = difflib.unified_diff(text.splitlines(), edited(text, changes).splitlines(), n=0, lineterm="")
    return [line for line in list(diff)[2:] if not line.startswith("@@")]


@pytest.mark.parametrize(("changes", "lines"), [
    ({"listen.host": "192.168.1.5"}, ["-  host: 127.0.0.1", "+  host: 192.168.1.5"]),
    ({"listen.port": 9}, ["-  port: 8080   # eol", "+  port: 9   # eol"]),
    ({"model": None}, ["-model: qwen   # the model"]),
    ({"listen.port": None}, ["-  port: 8080   # eol"]),
    ({"memory.ceiling": None, "memory.reserve": None}, ["-memory:", "-  ceiling: 6G", "-  reserve: 512M  # keep"]),
    ({"memory.ceiling": "7G"}, ["-  ceiling: 6G", "+  ceiling: 7G"]),
    ({"context": None, "trial_s": 5}, ["-context: 8192", "+trial_s: 5"]),
    ({"cpu.cpus": "0-3"}, ["-cpu: {threads: 4}", "+cpu: {threads: 4, cpus: 0-3}"]),
    ({"cpu.threads": None}, ["-cpu: {threads: 4}"]),
    ({"tls.cert": "/x", "tls.key": "/y"}, ["+tls:", "+  cert: /x", "+  key: /y"]),
    ({"worker.env": {"A": "1"}}, ["+  env: {A: '1'}"]),
    ({"worker.extra_args": ["--x"]}, ["-  extra_args:", "-    - --a", "-    - b", "+  extra_args: [--x]"]),
    ({"worker.extra_args": None}, ["-worker:", "-  extra_args:", "-    - --a", "-    - b"]),
    ({"store": None, "tls.cert": None}, []),
    ({"context": 8192}, []),
], ids=str)
def test_only_these_lines_change(changes: dict[str, Any], lines: list[str]) -> None:
    assert changed_lines(TEXT, changes) == lines


@pytest.mark.parametrize(("text", "changes", "new"), [
    ("", {"model": "m"}, "model: m\n"),
    ("# only words\n# model: x\n", {"model": "m"}, "# only words\n# model: x\nmodel: m\n"),
    ("# no newline", {"listen.port": 9}, "# no newline\nlisten:\n  port: 9\n"),
    ("model: x", {"context": 4096}, "model: x\ncontext: 4096\n"),
    ("model: x\n", {"model": None}, ""),
    ("listen:\nmodel: x\n", {"listen.port": 9}, "listen: {port: 9}\nmodel: x\n"),
    ("listen:\n    port: 1\n", {"listen.host": "::1"}, "listen:\n    port: 1\n    host: ::1\n"),
    ("context: 4096 # a\nlisten: {port: 8}", {"context": 1024}, "context: 1024 # a\nlisten: {port: 8}"),
    ("worker:\n  extra_args: ['--x']\n  env:\n    A: '1' # why\n# end\n", {"worker.env": None}, "worker:\n  extra_args: ['--x']\n# end\n"),
    ("model: 'it''s'\n", {"model": "a: b # c"}, "model: 'a: b # c'\n"),
    ("{context: 5000, model: x}", {"context": 1024, "cpu.threads": 3}, "{context: 1024, model: x, cpu: {threads: 3}}\n"),
    ('{"cpu": {"threads": 3}, "model": "x"}', {"cpu.threads": None}, "{model: x}\n"),
    ("model: x\r\ncontext: 4096\r\n", {"context": 1024}, "model: x\r\ncontext: 1024\r\n"),
])
def test_text(text: str, changes: dict[str, Any], new: str) -> None:
    assert edited(text, changes) == new


@pytest.mark.parametrize(("text", "words"), [
    ("context: 4096\ncontext: 8192\n", "cannot be changed by a program"),
    ("context: &x 4096\nmax_queued: *x\n", "cannot be changed by a program"),
    ("context: 4096\n...\n", "cannot be changed by a program"),
    ("- a", "is not a configuration"),
    ("a: [", "not valid YAML"),
    ("max_running: none\n", "max_running has a wrong value"),
], ids=["twice", "alias", "end-mark", "list", "broken", "wrong-already"])
def test_what_is_not_understood_is_not_touched(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        change(file, {"context": 1024, "max_queued": 7})
    assert file.read_text() == text


@pytest.mark.parametrize(("changes", "words"), [
    ({"colour": "red"}, "there is no setting `colour`"), ({"context": "many"}, "context has a wrong value"),
    ({"tls.cert": "/x"}, "tls needs both"),
])
def test_a_wrong_change_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        edited(TEXT, changes)


@pytest.mark.parametrize(("key", "text", "value"), [
    ("context", "4096", 4096), ("model", "4096", "4096"), ("memory.ceiling", "6G", "6G"), ("compile", "false", False),
    ("worker.env", "{A: 1}", {"A": 1}), ("worker.extra_args", "[--x, y]", ["--x", "y"]), ("worker.extra_args", "--x y", "--x y"),
    ("cpu.cpus", "0-3", "0-3"), ("model", "[", "["), ("listen.host", "::1", "::1"), ("nonsense", "1", "1"), ("model", "yes", "yes"),
])
def test_words_of_a_command_line_become_values(key: str, text: str, value: Any) -> None:
    found = value_of(key, text)
    assert (found, type(found)) == (value, type(value))


def test_mode_and_owner_stay_and_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "real" / "a.yaml", tmp_path / "appliance.yaml"
    file.parent.mkdir()
    file.write_text("model: x\n")
    file.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(file, 4321, 1234)
    link.symlink_to(file)
    before = file.stat()
    change(link, {"model": "y"})
    after = file.stat()
    assert link.is_symlink()
    assert file.read_text() == "model: y\n"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert [path.name for path in file.parent.iterdir()] == ["a.yaml"]


def test_a_missing_file_is_made_with_a_header(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "appliance.yaml"
    change(file, {"listen.port": 9})
    assert file.read_text() == HEADER + "listen:\n  port: 9\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_disk_that_refuses_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((StoreError, ConfigError), match=r"cannot be (written|read)|cannot write"):
        change(tmp_path / "file" / "a.yaml", {"model": "x"})


KEYS = st.sampled_from([
    ("model", ["qwen", "a b", "it's", "x: y", "# no", None]), ("context", [1024, 4096, None]), ("listen.port", [80, 8080, None]),
    ("listen.host", ["127.0.0.1", "::1", None]), ("memory.ceiling", ["6G", 1 << 30, None]), ("cpu.cpus", ["0-3", [0, 2], None]),
    ("worker.env", [{"A": "1", "B": "x y"}, None]), ("worker.extra_args", [["--x", "y z"], [], None]), ("compile", [True, False, None]),
])


@settings(deadline=None)
@given(st.lists(KEYS.flatmap(lambda entry: st.tuples(st.just(entry[0]), st.sampled_from(entry[1]))), max_size=6))
def test_any_changes_one_after_the_other_mean_what_they_say(changes: list[tuple[str, Any]]) -> None:
    text = TEXT
    for key, value in changes:
        text = edited(text, {key: value})
    said = dict(changes)
    sources = parse(text).sources
    assert {key for key, value in said.items() if value is not None} <= set(sources)
    assert not {key for key, value in said.items() if value is None} & set(sources)
    assert [line for line in TEXT.splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if line.startswith("#")]
