"""Write a stored model into one file that another node can import.

Does: list the files, sign the list, copy them once while their digests are compared with what the store recorded. Does
not: change the store. Rules: the file appears under its name only when it is whole; a damaged model is refused, also
when the damage shows while it is copied; the same stored model gives the same bytes; one block in memory at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from appliance import disk, laidout, manifest, prepared
from appliance.airgap import content, signature, tape
from appliance.airgap.content import FIRST, LAYOUT, MODEL, SIGNATURE, Content, Member
from appliance.errors import ModelError, StoreError, UsageError
from appliance.jobs import Event, ending_on_sigterm
from appliance.store import Store, damaged


def export(store: Store, name: str, target: Path, *, with_layout: bool, sign_key: Path | None, env: dict[str, str],
           on_event: Callable[[Event], None]) -> Content:
    """Write the model `name` to `target`, which must not exist. Raises ModelError (unknown, damaged, not laid out),
    UsageError (target, key), StoreError (disk); then there is no `target`."""
    if os.path.exists(target):  # noqa: PTH110  # no error for a name that is too long: writing says so
        raise UsageError(f"{target} exists already", do="choose another name, or remove it")
    stored = store.get(name)
    files = {MODEL + file: stored.path / file for file in (manifest.MANIFEST, *sorted(stored.manifest["files"]))}
    with disk.mapped("cannot read the store", store.root, store=True):
        known = {MODEL + file: Member(name=MODEL + file, bytes=entry["bytes"], sha256=entry["sha256"])
                 for file, entry in stored.manifest["files"].items()}
        known[MODEL + manifest.MANIFEST] = _member(MODEL + manifest.MANIFEST, stored.path / manifest.MANIFEST)
        if with_layout:
            layout = store.prepared_folder(stored.digest)
            index, why = laidout.read(layout, stored.digest) if layout.is_dir() else (None, "they are not there")
            if index is None:
                raise ModelError(f"the laid out weights of {name!r} cannot be exported", why=why,
                                 do=f"run `applianctl model repair {name}`, or leave out --with-kernel-cache")
            files |= {LAYOUT + file: layout / file for file in (prepared.INDEX, prepared.WEIGHTS)}
            known[LAYOUT + prepared.INDEX] = _member(LAYOUT + prepared.INDEX, layout / prepared.INDEX)
            known[LAYOUT + prepared.WEIGHTS] = Member(name=LAYOUT + prepared.WEIGHTS, bytes=index.bytes,
                                                      sha256=index.sha256)
    for member in files:
        if refusal := content.member_refusal(member):
            raise ModelError(f"{name!r} cannot be exported", why=f"{member}: {refusal}")
    listed = Content(digest=stored.digest, name=name, layout=prepared.LAYOUT_ID if with_layout else None,
                     members=tuple(known[member] for member in files))
    text = content.text(listed)
    head: list[tuple[str, bytes]] = [(FIRST, text)]
    if sign_key is not None:
        head.append((SIGNATURE, signature.sign(text, sign_key, env=env)))
    done = 0
    with ending_on_sigterm(), _written(target) as file:
        for member_name, data in head:
            file.write(tape.header(member_name, len(data)) + data + tape.padding(len(data)))
        on_event({"event": "phase", "phase": "copying", "note": ""})
        for member in listed.members:
            file.write(tape.header(member.name, member.bytes))
            for block in _blocks(files[member.name], member, name):
                file.write(block)
                done += len(block)
                on_event({"event": "progress", "done_bytes": done, "total_bytes": listed.bytes, "item": member.name})
            file.write(tape.padding(member.bytes))
        file.write(tape.END)
    return listed


def _member(name: str, path: Path) -> Member:
    found = disk.digests(path)
    return Member(name=name, bytes=found.bytes, sha256=found.whole)


def _blocks(path: Path, member: Member, model: str) -> Iterator[bytes]:
    """The file's bytes; after the last one it is known that they were the recorded ones."""
    hasher, size = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(tape.CHUNK_BYTES):
                hasher.update(block)
                size += len(block)
                if size > member.bytes:
                    break
                yield block
    except OSError as error:
        raise damaged(model, f"{path.name}: cannot be read ({error.strerror})") from None
    if (size, hasher.hexdigest()) != (member.bytes, member.sha256):
        raise damaged(model, f"{path.name}: contents changed")


@contextlib.contextmanager
def _written(target: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when it is whole, and leaves nothing otherwise."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(draft, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.rename(target)
        disk.fsync(target.parent)
    except OSError as error:
        raise _unwritten(target, error) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _unwritten(target: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"cannot write {target}", why="the disk is full", do="free space there, or choose another")
    if error.errno == errno.EFBIG:
        return StoreError(f"cannot write {target}", why="its file system takes no file of that size (FAT: 4 GiB)",
                          do="use a stick with exFAT or ext4")
    return StoreError(f"cannot write {target}", why=error.strerror or str(error), do="choose another place")
