"""Files of the state folder in whose place something else lies: nobody waits for the other end of a pipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance import digests, node, patrol, record, status
from appliance.errors import ConfigError, StoreError
from appliance.keys import KeyRing, configured_key
from appliance.regularfile import read_regular
from appliance.tune import archive

PLACES: dict[str, tuple[Callable[[Path], object], object]] = {
    # who reads it, and what is found
    "keys": (lambda path: KeyRing(path).accepts("sk-x"), False), "digests": (digests._load, {}), "patrol": (patrol._load, {}),
    "self-test": (node.read_trial, None), "measurements": (archive.read, None), "record": (lambda path: record.load(path.parent).good, None),
    "status": (status._object, {}),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_pipe_in_the_place_of_a_file_is_no_reason_to_wait(place: str, tmp_path: Path) -> None:
    path = tmp_path / ("record.json" if place == "record" else "file.json")
    os.mkfifo(path)
    read, found = PLACES[place]
    assert read(path) == found


def test_what_is_no_file_leaves_nothing_open(tmp_path: Path) -> None:
    """A service looks at some of them with each request."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match=r"no regular file|Is a directory"):
            read_regular(tmp_path / name, most_bytes=9)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("place", ["keys", "key"])
def test_a_pipe_is_no_key(place: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "k")
    with pytest.raises(StoreError if place == "keys" else ConfigError, match="it is no regular file"):
        KeyRing(tmp_path / "k").list() if place == "keys" else configured_key(str(tmp_path / "k"), {})
