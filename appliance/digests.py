"""The digest of a model source: SHA-256 over its files, remembered by (path, size, times, inode).

Does: stream the files once, keep the result in one small JSON file. Does not: decide which files matter
(`appliance.importing.source` does). Rules: a remembered digest counts only while size, mtime, ctime and inode are
unchanged *and* samples of its contents are: clocks lie, and a stick with a FAT file system has coarse times and
invents inodes at each mount, so two models of one shape can look alike. A file that changed within the last two
seconds, in the future, or while it was read, is not remembered (its time stamp could hide a second change); a cache
that cannot be read or written only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from appliance import disk
from appliance.errors import ModelError, StoreError
from appliance.importing.source import Source
from appliance.regularfile import read_regular

_BLOCK_BYTES = 4 << 20
_RACY_NS = 2_000_000_000
_MOST_ENTRIES = 1000
_MOST_BYTES = 16 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Spread evenly over a file, its beginning and its end included."""


def source_digest(
    source: Source, *, cache: Path | None, now: float, on_progress: Callable[[int, int], None],
) -> str:
    """64 hex digits over names and contents of the source's files; of a single file over its contents alone.

    `cache` is the JSON file of remembered digests (None: nothing is remembered), `now` the time in seconds since 1970;
    `on_progress` gets bytes done and total. Raises ModelError when a file cannot be read or changes meanwhile.
    """
    remembered = _load(cache) if cache is not None else {}
    fresh: dict[str, list[str]] = {}
    done, digests = 0, {}
    for file in source.files:
        path = str(file.absolute())
        try:
            stamp, touched = _stamp(file)
            entry = remembered.get(path)
            if entry is not None and entry[0] == stamp:
                digests[file.name] = entry[1]
                done += file.stat().st_size
                on_progress(done, source.bytes)
                continue
            digest, done = _stream(file, done, source.bytes, on_progress)
            if _stamp(file)[0] != stamp:
                raise ModelError(f"{file} changed while it was read", do="wait until it is complete, then try again")
        except OSError as error:
            raise ModelError(f"{file} cannot be read", why=error.strerror or str(error), do="check its owner") from None
        digests[file.name] = digest
        if now * 1e9 - touched > _RACY_NS:
            fresh[path] = [stamp, digest]
    if fresh and cache is not None:
        _save(cache, {**{p: e for p, e in remembered.items() if p not in fresh}, **fresh})
    if len(digests) == 1 and source.kind == "gguf":
        return next(iter(digests.values()))
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def _stamp(file: Path) -> tuple[str, int]:
    found = file.stat()
    parts = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev, _samples(file))
    return "-".join(map(str, parts)), max(found.st_mtime_ns, found.st_ctime_ns)


def _samples(file: Path) -> str:
    """A digest of some of the file's contents."""
    hasher = hashlib.sha256()
    with open(file, "rb", buffering=0) as reader:
        last = max(0, reader.seek(0, os.SEEK_END) - _SAMPLE_BYTES)
        for place in sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
            reader.seek(place)
            hasher.update(reader.read(_SAMPLE_BYTES))
    return hasher.hexdigest()[:16]


def _stream(file: Path, done: int, total: int, on_progress: Callable[[int, int], None]) -> tuple[str, int]:
    hasher = hashlib.sha256()
    with open(file, "rb") as reader:
        while block := reader.read(_BLOCK_BYTES):
            hasher.update(block)
            done += len(block)
            on_progress(done, total)
    return hasher.hexdigest(), done


def _load(cache: Path) -> dict[str, list[str]]:
    try:
        raw = json.loads(read_regular(cache, most_bytes=_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(raw, dict):
        return {}
    return {path: entry for path, entry in raw.items() if isinstance(entry, list) and len(entry) == 2
            and all(isinstance(part, str) for part in entry)}


def _save(cache: Path, entries: Mapping[str, list[str]]) -> None:
    newest = dict(list(entries.items())[-_MOST_ENTRIES:])
    draft = cache.with_name(f"{cache.name}.{os.getpid()}")
    try:
        with disk.mapped("cannot remember digests", cache.parent):
            cache.parent.mkdir(parents=True, exist_ok=True)
            disk.replace(cache, json.dumps(newest, indent=1) + "\n", draft=draft)
    except StoreError:
        with contextlib.suppress(OSError):
            draft.unlink()
