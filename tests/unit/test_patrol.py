"""The patrol reads everything in turn, within its bounds, and names what has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from appliance import pieces
from appliance.patrol import walk
from appliance.store import Store
from tests.unit.test_store import flip, lay_out, put

PIECE = 4096
WEIGHTS = bytes(range(256)) * 80  # five pieces


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for module in ("appliance.pieces", "appliance.patrol"):
        monkeypatch.setattr(f"{module}.PIECE_BYTES", PIECE)
    return Store(tmp_path / "store")


def test_every_piece_is_read_in_turn(store: Store, tmp_path: Path) -> None:
    digest = put(store, "a", "one", WEIGHTS)
    lay_out(store, digest)
    assert len(store.get("one").manifest["files"]["model.safetensors"]["pieces"]) == 5
    place = tmp_path / "state" / "patrol.json"
    read = [walk(store, digest, place=place, most_bytes=PIECE, seconds=9).read_bytes for _ in range(7)]
    # config.json has two bytes, and the next piece would be too much; the layout has 320, and a new round begins.
    assert read == [2, PIECE, PIECE, PIECE, PIECE, PIECE, 320 + 2]
    assert json.loads(place.read_text()) == {digest: 1}
    whole = walk(store, digest, place=place, most_bytes=1 << 30, seconds=9)
    assert whole.read_bytes == whole.total_bytes == len(WEIGHTS) + 2 + 320
    assert walk(store, digest, place=place, most_bytes=1 << 30, seconds=0).read_bytes == PIECE, "at least one piece"


@pytest.mark.parametrize("where", [0, PIECE - 1, PIECE, 3 * PIECE + 5, len(WEIGHTS) - 1])
def test_one_flipped_byte_is_found_within_one_round(store: Store, tmp_path: Path, where: int) -> None:
    digest = put(store, "a", "one", WEIGHTS)
    file = store.get("one").path / "model.safetensors"
    before = file.stat()
    file.chmod(0o644)
    with open(file, "r+b") as weights:
        weights.seek(where)
        weights.write(bytes([WEIGHTS[where] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # nothing but the contents tells
    found = [walk(store, digest, place=tmp_path / "place", most_bytes=PIECE, seconds=9) for _ in range(6)]
    said = [finding for one in found for finding in one.model]
    first = where // PIECE * PIECE
    assert said == [f"model.safetensors: contents changed between bytes {first} and {first + PIECE}"]
    assert not any(one.layout for one in found)


def test_the_layout_is_told_apart(store: Store, tmp_path: Path) -> None:
    digest = put(store, "a", "one")
    flip(lay_out(store, digest) / "weights.bin")
    found = walk(store, digest, place=tmp_path / "place", most_bytes=1 << 30, seconds=9)
    assert (found.model, found.layout) == ((), ("weights.bin: contents changed between bytes 0 and 320",))


def test_sizes_and_checksums_tell_at_once(store: Store, tmp_path: Path) -> None:
    digest = put(store, "a", "one", WEIGHTS)
    layout = lay_out(store, digest)
    (layout / "index.json").chmod(0o644)
    (layout / "index.json").write_text("{}")
    os.truncate(store.get("one").path / "model.safetensors", 3)
    found = walk(store, digest, place=tmp_path / "place", most_bytes=1, seconds=9)
    assert found.model == (f"model.safetensors: 3 bytes, recorded {len(WEIGHTS)}",)
    assert found.layout == ("index.json: it is not readable",)
    (store.root / "objects" / digest / "manifest.json").unlink()
    assert walk(store, digest, place=tmp_path / "place", most_bytes=1, seconds=9).model[0].startswith("manifest.json: ")


@pytest.mark.parametrize("content", ["", "[]", "[" * 9999, '{"x": "y"}', '{"DIGEST": -3}', '{"DIGEST": 99}', '{"DIGEST": true}'])
def test_a_lost_place_costs_nothing_but_time(store: Store, tmp_path: Path, content: str) -> None:
    digest = put(store, "a", "one", WEIGHTS)
    place = tmp_path / "place"
    place.write_text(content.replace("DIGEST", digest))
    assert walk(store, digest, place=place, most_bytes=1 << 30, seconds=9).read_bytes == len(WEIGHTS) + 2


def test_a_place_that_cannot_be_kept_is_no_error(store: Store, tmp_path: Path) -> None:
    digest = put(store, "a", "one")
    (tmp_path / "file").touch()
    assert walk(store, digest, place=tmp_path / "file" / "place", most_bytes=1, seconds=9).read_bytes == 2


def test_a_model_of_a_release_without_pieces_is_read_by_files(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as old:
        old.setattr(pieces, "PIECE_BYTES", 1 << 30)
        digest = put(store, "a", "one", WEIGHTS)
    file = store.root / "objects" / digest / "manifest.json"
    said = json.loads(file.read_text())
    assert "pieces" not in said["files"]["model.safetensors"]
    del said["checksum"]
    file.chmod(0o644)
    file.write_text(json.dumps(said))
    assert store.verify(digest) == []
    flip(store.root / "objects" / digest / "model.safetensors")
    found = walk(store, digest, place=tmp_path / "place", most_bytes=1 << 30, seconds=9)
    assert found.model == (f"model.safetensors: contents changed between bytes 0 and {len(WEIGHTS)}",)
