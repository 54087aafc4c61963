"""A survey of a Hub model before its first large byte, and the fetch of what is missing. Runs in the child.

`survey` leaves the model as it will be: small files whole, weight files as holes of their full size with their headers.
`fetch` brings the files that `source.json` in the folder names. Rules: headers are read with the bounds of
`appliance.importing`; what was fetched once is not fetched again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

from appliance.errors import ModelError
from appliance.hub.orders import Order
from appliance.hub.selection import Listing, RemoteFile, contents_of, gguf_choice, small_files, weight_files
from appliance.hub.transfer import PART, Hub
from appliance.importing.gguf_header import MAX_HEADER_BYTES as MAX_GGUF_BYTES
from appliance.importing.gguf_header import read_header
from appliance.importing.safetensors import MAX_HEADER_BYTES
from appliance.importing.source import INDEX
from appliance.report import Event
from appliance.sources import key_of

FIRST_BYTES = 1 << 18
ALIVE_S = 60.0
GGUF_FIRST_BYTES = 4 << 20


def survey(hub: Hub, order: Order, folder: Path, event: Event) -> dict[str, Any]:
    """Pin the commit, choose the files, outline them in `folder`. Returns `{commit, file, files, main, contents}`;
    `files` is empty for a model that is stored already."""
    event({"event": "phase", "phase": "asking", "note": order.endpoint})
    listing = hub.listing()
    parts = gguf_choice(listing, order.reference)
    chosen = parts
    file = parts[0].name if parts else None
    there: dict[str, Any] = {"commit": listing.commit, "file": file, "files": {}, "main": "", "contents": ""}
    if str(order.reference.at(listing.commit, file)) in order.settled:
        return there
    if contents_of(parts) in order.settled:
        return {**there, "contents": contents_of(parts)}
    known = Known(order, listing, file)
    event({"event": "phase", "phase": "outlining", "note": ""})
    for number, part in enumerate(parts):
        _outline_gguf(hub, known, part, folder / part.local_name, first=number == 0)
    if not parts:
        small = small_files(listing)
        for one in small:
            if not known.copy(one, folder):
                hub.download(listing, one, folder / one.local_name, lambda _count: None)
        weights = weight_files(listing, _index(listing, folder))
        if (contents := contents_of((*small, *weights))) in order.settled:
            return {**there, "contents": contents}
        for one in weights:
            _outline_safetensors(hub, known, one, folder / one.local_name)
        chosen = (*small, *weights)
    files = {one.name: {"bytes": one.bytes, "sha256": one.sha256, "git_sha1": one.git_sha1} for one in chosen}
    return {**there, "files": files, "main": parts[0].local_name if parts else "", "contents": contents_of(chosen)}


def fetch(hub: Hub, order: Order, folder: Path, event: Event) -> dict[str, Any]:
    """Bring every file of `source.json` into the folder. Returns `{fetched_bytes, files}`."""
    source = json.loads((folder / "source.json").read_text("utf-8"))
    files = [RemoteFile(name=name, **said) for name, said in sorted(source["files"].items())]
    listing = Listing(repo=order.repo, commit=source["commit"], files=tuple(files))
    total = sum(file.bytes for file in files)
    done = sum(_present_bytes(folder, file) for file in files)
    before, told = done, time.monotonic()
    event({"event": "phase", "phase": "fetching", "note": f"{len(files)} files"})
    # Small ones first: what is wrong with them is known early.
    for file in sorted(files, key=lambda one: one.bytes):
        target = folder / file.local_name
        if target.is_file() and target.stat().st_size == file.bytes:
            continue

        def came(count: int, name: str = file.name) -> None:
            nonlocal done, told
            done += count
            if time.monotonic() - told > ALIVE_S:  # a step of the progress may take an hour over a slow line
                told = time.monotonic()
                event({"event": "alive"})
            event({"event": "progress", "done_bytes": done, "total_bytes": total, "item": name})

        hub.download(listing, file, target, came)
    return {"fetched_bytes": max(0, done - before), "files": len(files)}


def _present_bytes(folder: Path, file: RemoteFile) -> int:
    for path in (folder / file.local_name, folder / (file.local_name + PART)):
        if path.is_file():
            return min(path.stat().st_size, file.bytes)
    return 0


def _index(listing: Listing, folder: Path) -> object:
    if INDEX not in listing.by_name():
        return None
    try:
        return json.loads((folder / INDEX).read_text("utf-8"))
    except (ValueError, RecursionError):
        return ()


class Known:
    """What an interrupted fetch of the same commit has brought already."""

    def __init__(self, order: Order, listing: Listing, file: str | None) -> None:
        self.listing = listing
        self._folder = Path(order.known) / key_of(order.repo, listing.commit, file) if order.known else None

    def copy(self, file: RemoteFile, folder: Path) -> bool:
        """Copy a whole file, which was checked when it came; False where it is not there."""
        if self._folder is None or not (self._folder / file.local_name).is_file():
            return False
        shutil.copyfile(self._folder / file.local_name, folder / file.local_name)
        return (folder / file.local_name).stat().st_size == file.bytes

    def range(self, hub: Hub, file: RemoteFile, start: int, stop: int) -> bytes:
        """As `hub.range`, from the disk where that much has come."""
        for name in (file.local_name, file.local_name + PART) if self._folder else ():
            assert self._folder is not None
            with contextlib.suppress(OSError), open(self._folder / name, "rb") as part:
                part.seek(start)
                if len(got := part.read(min(stop, file.bytes) - start)) == min(stop, file.bytes) - start:
                    return got
        return hub.range(self.listing, file, start, stop)


def _outline_safetensors(hub: Hub, known: Known, file: RemoteFile, target: Path) -> None:
    start = known.range(hub, file, 0, FIRST_BYTES)
    length = int.from_bytes(start[:8], "little") + 8
    if len(start) < length <= min(MAX_HEADER_BYTES + 8, file.bytes):
        start += known.range(hub, file, len(start), length)
    _hole(target, start, file.bytes)


def _outline_gguf(hub: Hub, known: Known, file: RemoteFile, target: Path, *, first: bool) -> None:
    """How long the header is shows only when it was read: more is fetched until it ends before what was fetched."""
    got, more = b"", GGUF_FIRST_BYTES if first else FIRST_BYTES
    while True:
        got += known.range(hub, file, len(got), len(got) + more)
        _hole(target, got, file.bytes)
        try:
            tensors = read_header(target).tensors
        except ModelError:
            if len(got) == file.bytes or len(got) > MAX_GGUF_BYTES or got[:4] != b"GGUF":
                raise
        else:
            if len(got) == file.bytes or min((t.offset for t in tensors.values()), default=0) <= len(got):
                break
        more = len(got)
    # Rotary factors are tensors by form and configuration by meaning: without them a model cannot be judged.
    for name, tensor in tensors.items():
        if "rope" in name and tensor.bytes <= FIRST_BYTES:
            data = known.range(hub, file, tensor.offset, tensor.offset + tensor.bytes)
            with open(target, "r+b") as out:
                out.seek(tensor.offset)
                out.write(data)


def _hole(target: Path, start: bytes, size: int) -> None:
    """A file of its full size on no more disk than its beginning needs."""
    with open(target, "wb") as out:
        out.write(start)
        out.truncate(size)
