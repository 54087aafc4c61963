"""Take a model bundle into the store: read once, check everything, then rename.

Does: read the list and its signature, refuse before anything is unpacked, unpack into drafts of the store while digests
are compared, hold the model's own manifest and headers against what was unpacked, commit. Does not: know where keys
are, or lay weights out. Rules: where keys are required nothing but the signature is looked at before it is good; what
is unpacked is named by the list, never by the tar; a refused bundle leaves the store as it was; memory is bounded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from appliance import disk, laidout, manifest, prepared
from appliance.airgap import content, signature, tape
from appliance.airgap.content import FIRST, LAYOUT, MODEL, SIGNATURE, Content, refused
from appliance.draft import Draft
from appliance.errors import UsageError
from appliance.importing.source import inspect, read_config
from appliance.jobs import Event, ending_on_sigterm
from appliance.pieces import Digests
from appliance.probe.model import read_model
from appliance.quantize import adopt
from appliance.quantize.layers import refuse_architecture
from appliance.store import Store, check_name, name_refusal

_REPORT: Mapping[str, type | tuple[type, ...]] = {
    "layers": list, "kept": list, "template": dict, "origin": dict, "group_size_overrides": dict, "grid": str,
    "parameters": int, "bits_per_weight": (int, float), "group_size": int,
}


@dataclass(frozen=True, kw_only=True)
class Front:
    """What stands at the beginning: the list, and who has signed it. `signed`: there is a signature, which counts only
    with a `signer`. `pending`: the header of the first member, which had to be read to see whether there is one."""

    content: Content
    signed: bool
    signer: str | None
    pending: tuple[str, int] | None


@dataclass(frozen=True, kw_only=True)
class Imported:
    """`cached`: the model was there and whole. `layout`: its prepared layout came with it and was taken."""

    name: str
    digest: str
    cached: bool
    layout: bool
    signer: str | None


def read_front(file: IO[bytes], *, keys: Sequence[str] | None) -> Front:
    """Read list and signature. `keys`: the trusted public keys where a signature is required, else None. Raises
    ModelError."""
    reader = tape.Reader(file)
    found = reader.next()
    if found is None or found[0] != FIRST or not 0 < found[1] <= content.MOST_BYTES:
        raise refused(f"it does not begin with {FIRST}")
    text = b"".join(reader.contents(found[1]))
    signed, pending = None, reader.next()
    if pending is not None and pending[0] == SIGNATURE:
        if pending[1] > content.MOST_SIGNATURE_BYTES:
            raise refused("its signature is too long")
        signed = b"".join(reader.contents(pending[1]))
        pending = reader.next()
    signer = signature.check(text, signed, keys) if keys is not None else None
    listed = content.parse(text)
    _check_length(file, [len(text), *([len(signed)] if signed is not None else [])], listed)
    return Front(content=listed, signed=signed is not None, signer=signer, pending=pending)


def take(file: IO[bytes], *, store: Store, name: str | None, keys: Sequence[str] | None,
         on_event: Callable[[Event], None], on_wait: Callable[[], None]) -> Imported:
    """Import the bundle in `file` under `name` (None: the name it has). A model that is there and whole is kept, a
    damaged one is replaced. Raises ModelError (65) for a bundle that cannot be used, UsageError for a name that is
    taken, StoreError (disk); the store is then as before."""
    front = read_front(file, keys=keys)
    listed = front.content
    chosen = name or listed.name
    if name is None and name_refusal(listed.name):
        raise UsageError("the bundle's model needs another name", why=str(name_refusal(listed.name)), do="give --name")
    check_name(chosen)
    if name is None and store.names().get(chosen, listed.digest) != listed.digest:
        raise UsageError(f"the name {chosen} belongs to another model", do="give --name")
    there = listed.digest in store.digests()
    if there:
        on_event({"event": "phase", "phase": "verifying", "note": ""})
        if not store.verify(listed.digest):
            store.point(chosen, listed.digest)
            return Imported(name=chosen, digest=listed.digest, cached=True, layout=False, signer=front.signer)
    store.sweep()
    with ending_on_sigterm(), ExitStack() as drafts:
        model = drafts.enter_context(store.begin(listed.digest, need_bytes=listed.bytes, on_wait=on_wait))
        layout = None
        if listed.layout == prepared.LAYOUT_ID:  # another release's layout is of no use here
            layout = drafts.enter_context(store.begin(prepared.folder_name(listed.digest), on_wait=on_wait))
        on_event({"event": "phase", "phase": "unpacking", "note": ""})
        with disk.mapped("cannot write the model to the store", store.root, store=True):
            unpacked = _unpack(tape.Reader(file), front, {MODEL: model, LAYOUT: layout}, on_event)
            _check_model(model.folder, listed, unpacked)
            if layout is not None:
                _check_layout(layout.folder, listed.digest, unpacked)
        store.adopt(model, name=chosen, replace=there)
        if layout is not None:
            store.commit_prepared(layout, listed.digest)
    return Imported(name=chosen, digest=listed.digest, cached=False, layout=layout is not None, signer=front.signer)


def _check_length(file: IO[bytes], head: list[int], listed: Content) -> None:
    """A file that was cut short is refused before anything is unpacked."""
    found = os.fstat(file.fileno())
    whole = tape.length(iter([*head, *(member.bytes for member in listed.members)]))
    if stat.S_ISREG(found.st_mode) and found.st_size != whole:
        raise refused(f"it has {found.st_size} bytes and should have {whole}")


def _unpack(reader: tape.Reader, front: Front, drafts: dict[str, Draft | None],
            on_event: Callable[[Event], None]) -> dict[str, Digests]:
    found, done, total = front.pending, 0, front.content.bytes
    unpacked = {}
    for member in front.content.members:
        if found != (member.name, member.bytes):
            raise refused(f"where {member.name} should be there is something else")
        folder, _, file = member.name.partition("/")
        draft = drafts[f"{folder}/"]
        digests = Digests()
        with open(draft.folder / file if draft else os.devnull, "xb" if draft else "wb", buffering=0) as out:
            for block in reader.contents(member.bytes):
                digests.update(block)
                disk.write_all(out, block)
                done += len(block)
                on_event({"event": "progress", "done_bytes": done, "total_bytes": total, "item": member.name})
        if digests.whole != member.sha256:
            raise refused(f"the contents of {member.name} are not what its list says")
        unpacked[member.name] = digests
        found = reader.next()
    if found is not None:
        raise refused("it holds more than its list says")
    return unpacked


def _check_model(folder: Path, listed: Content, unpacked: dict[str, Digests]) -> None:
    """The model's own manifest must describe exactly these files, and their headers a model that can be served."""
    said, broken = manifest.read(folder)
    if broken:
        raise refused(broken)
    files = {MODEL + name: entry for name, entry in said["files"].items()}
    if said.get("digest") != listed.digest:
        raise refused(f"its {manifest.MANIFEST} belongs to another model")
    if manifest.made_by_these_rules(said) and manifest.key(said["source_digest"], said["recipe"]) != listed.digest:
        raise refused("its source and recipe do not belong to its digest")
    if files.keys() != {name for name in unpacked if name.startswith(MODEL)} - {MODEL + manifest.MANIFEST}:
        raise refused(f"its {manifest.MANIFEST} lists other files")
    for name, entry in files.items():
        found = unpacked[name]
        listed_pieces = tuple(entry.get("pieces", found.pieces))
        if (entry["bytes"], entry["sha256"], listed_pieces) != (found.bytes, found.whole, found.pieces):
            raise refused(f"its {manifest.MANIFEST} says something else of {name}")
    if not all(map(str.isprintable, _texts(said))):
        raise refused(f"its {manifest.MANIFEST} holds characters that are no text")
    if field := _wrong_field(said["report"]):
        raise refused(f"`{field}` in the report of its {manifest.MANIFEST} is wrong")
    refuse_architecture(read_config(folder), folder)
    adopt.check(inspect(folder))
    read_model(folder, name=listed.name, digest=listed.digest)


def _check_layout(folder: Path, digest: str, unpacked: dict[str, Digests]) -> None:
    index, why = laidout.read(folder, digest)
    if index is None:
        raise refused(f"its layout cannot be used: {why}")
    weights = unpacked[LAYOUT + prepared.WEIGHTS]
    if (index.sha256, index.pieces) != (weights.whole, weights.pieces):
        raise refused(f"its {prepared.INDEX} says something else of {prepared.WEIGHTS}")


def _wrong_field(report: Mapping[str, Any]) -> str | None:
    """The first field of a report that is not what every command takes it for; any of them may be absent."""
    for field, kinds in _REPORT.items():
        if report.get(field) is not None and not isinstance(report[field], kinds):
            return field
    return next((field for field in ("layers", "kept") for one in report.get(field) or () if not isinstance(one, dict)
                 or (field == "layers" and "grid" in report and not {"route", "bits"} <= one.keys())), None)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value: they are shown on terminals."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
