"""Source digests are remembered, and forgotten when a file may have changed."""

from __future__ import annotations

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


def read_bytes(folder: Path, cache: Path, now: float = LATER) -> tuple[str, int]:
    """The digest, and how many files were really read (progress comes in blocks only for those that are)."""
    opened = []
    import builtins

    original = builtins.open

    def counting(file: object, *args: object, **kwargs: object) -> object:
        if "rb" in args:
            opened.append(file)
        return original(file, *args, **kwargs)  # type: ignore[call-overload]

    source = inspect(folder)
    builtins.open = counting  # type: ignore[assignment]
    try:
        return source_digest(source, cache=cache, now=now, on_progress=lambda done, total: None), len(opened)
    finally:
        builtins.open = original


def test_a_second_look_reads_nothing(folder: Path, tmp_path: Path) -> None:
    first, read = read_bytes(folder, tmp_path / "state" / "digests.json")
    assert read == 4
    assert read_bytes(folder, tmp_path / "state" / "digests.json") == (first, 0)


def test_a_new_time_stamp_is_read_again(folder: Path, tmp_path: Path) -> None:
    first, _ = read_bytes(folder, tmp_path / "digests.json")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert read_bytes(folder, tmp_path / "digests.json") == (first, 1)


def test_same_size_and_mtime_but_other_contents_is_seen(folder: Path, tmp_path: Path) -> None:
    first, _ = read_bytes(folder, tmp_path / "digests.json")
    file = folder / "tokenizer.json"
    before = file.stat()
    time.sleep(0.02)  # a tick of the file system's clock, so that ctime moves
    file.write_text("[]")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second, read = read_bytes(folder, tmp_path / "digests.json")
    assert second != first
    assert read == 1


def test_a_file_that_changed_just_now_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    assert read_bytes(folder, tmp_path / "digests.json", now=time.time())[1] == 4
    assert read_bytes(folder, tmp_path / "digests.json", now=time.time())[1] == 4


@pytest.mark.parametrize("content", ["", "{", "[]", '{"/x": 1}', '{"/x": ["a"]}'])
def test_a_broken_cache_costs_time_only(folder: Path, tmp_path: Path, content: str) -> None:
    first, _ = read_bytes(folder, tmp_path / "digests.json")
    (tmp_path / "digests.json").write_text(content)
    assert read_bytes(folder, tmp_path / "digests.json") == (first, 4)


def test_a_cache_that_cannot_be_written_is_no_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, _ = read_bytes(folder, tmp_path / "file" / "digests.json")
    assert read_bytes(folder, tmp_path / "digests.json")[0] == first


def test_what_counts_and_what_does_not(folder: Path, tmp_path: Path) -> None:
    first, _ = read_bytes(folder, tmp_path / "digests.json")
    (folder / "README.md").write_text("a note")
    assert read_bytes(folder, tmp_path / "digests.json")[0] == first
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert read_bytes(folder, tmp_path / "digests.json")[0] != first


def test_the_place_of_a_source_does_not_count(folder: Path, tmp_path: Path) -> None:
    moved = source_folder(tmp_path / "elsewhere")
    assert read_bytes(folder, tmp_path / "a.json")[0] == read_bytes(moved, tmp_path / "b.json")[0]


def test_a_file_that_vanishes_is_one_line(folder: Path, tmp_path: Path) -> None:
    source = inspect(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read: No such file"):
        source_digest(source, cache=tmp_path / "digests.json", now=LATER, on_progress=lambda done, total: None)
