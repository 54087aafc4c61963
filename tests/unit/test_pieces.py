"""Digests of a file and of its pieces: the same whatever the blocks were."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import disk, pieces
from appliance.pieces import Digests


@given(st.integers(0, 70), st.lists(st.integers(1, 40), min_size=1))
def test_blocks_do_not_matter(size: int, cuts: list[int]) -> None:
    data = bytes(range(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", 16)
        digests, rest = Digests(), data
        for cut in cuts:
            digests.update(rest[:cut])
            rest = rest[cut:]
        digests.update(rest)
        expected = [hashlib.sha256(data[i : i + 16]).hexdigest() for i in range(0, size, 16)] if size > 16 else []
        assert digests.whole == hashlib.sha256(data).hexdigest()
        assert list(digests.pieces) == expected
        assert pieces.count(size) == len(expected)
        assert digests.bytes == size


def test_a_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * ((16 << 20) + 1))
    found = disk.digests(file)
    assert len(found.pieces) == 2
    assert found.pieces[1] == hashlib.sha256(b"x").hexdigest()
    assert found.whole == disk.sha256(file)


def test_folders_change_places(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "is").write_text(name)
    disk.exchange(tmp_path / "a", tmp_path / "b")
    assert [(tmp_path / name / "is").read_text() for name in "ab"] == ["b", "a"]
    with pytest.raises(OSError, match="No such file"):
        disk.exchange(tmp_path / "a", tmp_path / "c")
