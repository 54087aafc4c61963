"""The patrol: stored bytes are read again piece by piece, so that damage is found before it is served for long.

Does: walk over the files of one model and of its prepared layout from a remembered place on, for a bounded time and
number of bytes, and compare each piece with its recorded digest. Does not: repair, or decide what damage means. Rules:
what one walk left out the next one reads; the place is a hint: a file that lost it begins anew; nothing depends on a
clock; what was read of the portable model is not kept in the page cache, because nobody else wants it there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance import disk, laidout, manifest, prepared
from appliance.errors import StoreError
from appliance.pieces import PIECE_BYTES
from appliance.regularfile import read_regular
from appliance.store import Store

FILE = "patrol.json"
START_BYTES, START_S = 256 << 20, 1.0
"""What one start of the service may spend."""
MODELS = 16
"""Places that are remembered."""
MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`laid_out`: of the prepared layout, which the worker maps; else of the portable model."""

    path: Path
    offset: int
    bytes: int
    sha256: str
    laid_out: bool


@dataclass(frozen=True, kw_only=True)
class Walked:
    """`model`, `layout`: one sentence for each damaged piece, beginning with its file. `total_bytes`: of a round."""

    model: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    read_bytes: int = 0
    total_bytes: int = 0


def walk(store: Store, digest: str, *, place: Path, most_bytes: int, seconds: float) -> Walked:
    """Read on from the remembered `place` (a JSON file), at least one piece. Raises StoreError for a store that cannot
    be read at all."""
    with disk.mapped("cannot read the store", store.root, store=True):
        folder, layout = store.root / "objects" / digest, store.prepared_folder(digest)
        said, broken = manifest.read(folder)
        if broken:
            return Walked(model=(broken,))
        found = manifest.shape(folder)
        index, why = laidout.read(layout, digest) if layout.is_dir() else (None, "")
        route = [*_of_model(folder, said["files"]), *(_of_layout(layout, index) if index else ())]
        if found or why:  # sizes tell already
            return Walked(model=tuple(found), layout=(why,) if why else ())
        wrong: list[str] = []
        worn: list[str] = []
        places = _load(place)
        at, read = places.get(digest, 0) % max(len(route), 1), 0
        until = time.monotonic() + seconds
        for _ in range(len(route)):
            piece = route[at]
            if read and (read + piece.bytes > most_bytes or time.monotonic() >= until):
                break
            if finding := _check(piece):
                (worn if piece.laid_out else wrong).append(finding)
            read += piece.bytes
            at = (at + 1) % len(route)
        _save(place, {**{key: value for key, value in places.items() if key != digest}, digest: at})
    return Walked(model=tuple(wrong), layout=tuple(worn), read_bytes=read,
                  total_bytes=sum(piece.bytes for piece in route))


def _of_model(folder: Path, files: Mapping[str, Mapping[str, object]]) -> Iterator[Piece]:
    for name, entry in sorted(files.items()):
        listed, size = entry.get("pieces"), int(str(entry["bytes"]))
        digests = tuple(listed) if isinstance(listed, list) else ()
        yield from _of_file(folder / name, size, digests, str(entry["sha256"]), laid_out=False)


def _of_layout(folder: Path, index: prepared.Index) -> Iterator[Piece]:
    yield from _of_file(folder / prepared.WEIGHTS, index.bytes, index.pieces, index.sha256, laid_out=True)


def _of_file(path: Path, size: int, digests: tuple[str, ...], whole: str, *, laid_out: bool) -> Iterator[Piece]:
    if not digests:  # small, or stored by a release that knew no pieces
        yield Piece(path=path, offset=0, bytes=size, sha256=whole, laid_out=laid_out)
    for number, digest in enumerate(digests):
        offset = number * PIECE_BYTES
        yield Piece(path=path, offset=offset, bytes=min(PIECE_BYTES, size - offset), sha256=digest, laid_out=laid_out)


def _check(piece: Piece) -> str | None:
    hasher, rest = hashlib.sha256(), piece.bytes
    try:
        with open(piece.path, "rb", buffering=0) as file:
            file.seek(piece.offset)
            while rest and (block := file.read(min(rest, disk.BLOCK_BYTES))):
                hasher.update(block)
                rest -= len(block)
            if not piece.laid_out:
                os.posix_fadvise(file.fileno(), piece.offset, piece.bytes, os.POSIX_FADV_DONTNEED)
    except PermissionError:
        raise  # not damage: somebody else may read it
    except OSError as error:
        return f"{piece.path.name}: cannot be read ({error.strerror})"
    if hasher.hexdigest() != piece.sha256:
        return f"{piece.path.name}: contents changed between bytes {piece.offset} and {piece.offset + piece.bytes}"
    return None


def _load(place: Path) -> dict[str, int]:
    try:
        raw = json.loads(read_regular(place, most_bytes=MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(raw, dict):
        return {}
    return {key: value for key, value in raw.items() if type(value) is int and value >= 0}


def _save(place: Path, places: Mapping[str, int]) -> None:
    """A place that cannot be kept costs a piece that is read twice."""
    draft = place.with_name(f"{place.name}.{os.getpid()}")
    with contextlib.suppress(StoreError), disk.mapped("cannot remember the patrol", place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(place, json.dumps(dict(list(places.items())[-MODELS:])) + "\n", draft=draft)
