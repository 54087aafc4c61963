"""Source digests are remembered, and forgotten when a file may have changed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from appliance.digests import source_digest
from appliance.errors import ModelError
from appliance.importing.source import inspect
from tests.process.fake_models import source_folder

LATER = time.time() + 3600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return source_folder(tmp_path / "source")


def look(folder: Path, cache: Path, now: float = LATER) -> str:
    return source_digest(inspect(folder), cache=cache, now=now, on_progress=lambda done, total: None)


def poison(cache: Path) -> None:
    """Falsify every remembered digest: a result that stays right was not taken from the cache."""
    entries = json.loads(cache.read_text())
    assert entries
    cache.write_text(json.dumps({path: [stamp, "0" * 64] for path, (stamp, _) in entries.items()}))


def test_a_second_look_reads_nothing(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "state" / "digests.json"
    first = look(folder, cache)
    assert len(json.loads(cache.read_text())) == 4
    assert look(folder, cache) == first
    poison(cache)
    assert look(folder, cache) != first


def test_a_new_time_stamp_is_read_again(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    first = look(folder, cache)
    poison(cache)
    for file in folder.iterdir():
        os.utime(file, ns=(1, 1))
    assert look(folder, cache) == first
    poison(cache)
    assert look(folder, cache) != first


def test_same_size_and_mtime_but_other_contents_is_seen(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    first = look(folder, cache)
    file = folder / "tokenizer.json"
    before = file.stat()
    time.sleep(0.02)  # a tick of the file system's clock, so that ctime moves
    file.write_text("[]")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert look(folder, cache) != first


def test_a_file_that_changed_just_now_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    look(folder, tmp_path / "digests.json", now=time.time())
    assert not (tmp_path / "digests.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"/x": 1}', '{"/x": ["a"]}'])
def test_a_broken_cache_costs_time_only(folder: Path, tmp_path: Path, content: str) -> None:
    first = look(folder, tmp_path / "digests.json")
    (tmp_path / "digests.json").write_text(content)
    assert look(folder, tmp_path / "digests.json") == first


def test_a_cache_that_cannot_be_written_is_no_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first = look(folder, tmp_path / "file" / "digests.json")
    assert look(folder, tmp_path / "digests.json") == first


def test_what_counts_and_what_does_not(folder: Path, tmp_path: Path) -> None:
    first = look(folder, tmp_path / "digests.json")
    (folder / "README.md").write_text("a note")
    assert look(folder, tmp_path / "digests.json") == first
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert look(folder, tmp_path / "digests.json") != first


def test_the_place_of_a_source_does_not_count(folder: Path, tmp_path: Path) -> None:
    moved = source_folder(tmp_path / "elsewhere")
    assert look(folder, tmp_path / "a.json") == look(moved, tmp_path / "b.json")


def test_a_file_that_vanishes_is_one_line(folder: Path, tmp_path: Path) -> None:
    source = inspect(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read: No such file"):
        source_digest(source, cache=tmp_path / "digests.json", now=LATER, on_progress=lambda done, total: None)


def test_two_models_of_one_shape_with_the_same_times_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """A stick without true times, mounted again with another model: same path, size, times, inode. Only contents tell."""
    cache = tmp_path / "digests.json"
    first = look(folder, cache)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"\x07")
    other = look(folder, tmp_path / "none.json")
    assert other != first
    entries = json.loads(cache.read_text())
    stamp = entries[str(file)][0]
    now = "-".join([*look_stamp(file).split("-")[:-1], stamp.split("-")[-1]])  # as if size, times and inode had not moved
    entries[str(file)][0] = now
    cache.write_text(json.dumps(entries))
    assert look(folder, cache) == other


def look_stamp(file: Path) -> str:
    from appliance.digests import _stamp

    return _stamp(file)[0]


@pytest.mark.parametrize(("when", "now", "kept"), [(1, 1_700_000_000.0, True), (4_000_000_000, 1_700_000_000.0, False), (1, 0.0, False)])
def test_lying_clocks_cost_time_only(folder: Path, tmp_path: Path, when: int, now: float, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files from 1970 or from the future, and a clock that stands at 1970: never a digest of other contents."""
    from appliance import digests

    real = digests._stamp
    monkeypatch.setattr(digests, "_stamp", lambda file: (real(file)[0], when * 1_000_000_000))
    cache = tmp_path / "digests.json"
    first = look(folder, cache, now=now)
    assert cache.exists() is kept
    assert look(folder, cache, now=now) == first
    (folder / "tokenizer.json").write_text("[]")
    assert look(folder, cache, now=now) != first


def test_nothing_is_remembered_without_a_place(folder: Path, tmp_path: Path) -> None:
    first = source_digest(inspect(folder), cache=None, now=LATER, on_progress=lambda done, total: None)
    assert first == look(folder, tmp_path / "digests.json")
