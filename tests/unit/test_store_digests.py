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
