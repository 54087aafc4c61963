"""Fetched sources: what came from the Hub and is not a stored model yet, in `store/sources/`.

    sources/KEY/    the files of one commit under their names, NAME.part what is not whole, source.json

Does: open, list, drop, prune. Does not: fetch, or know the Hub. Rules: a folder is locked (flock on itself) for as long
as its fetcher or the fetcher's child lives; it lies on the store's disk, stays when a fetch is interrupted, so that the
next one goes on, and goes when its model is stored, unless it is to be kept; `prune` never takes one that is in use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import disk
from appliance.errors import StoreError, TransientError

RECORD = "source.json"
FOLDER = "sources"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """One folder of sources. `bytes` on disk now, `wanted_bytes` of all its files; `busy`: somebody fetches into it."""

    key: str
    path: Path
    source: str
    bytes: int
    wanted_bytes: int
    kept: bool
    busy: bool

    @property
    def whole(self) -> bool:
        return self.bytes >= self.wanted_bytes > 0


@dataclass(frozen=True, kw_only=True)
class Held:
    """A locked folder; pass `lock_fd` to the child that writes here."""

    key: str
    path: Path
    lock_fd: int


def key_of(repo: str, commit: str, file: str | None) -> str:
    """The folder's name: readable, and one for each repository, commit and file."""
    parts = [repo.replace("/", "--"), commit[:12], *([file.replace("/", "--")] if file else [])]
    key = re.sub(r"[^A-Za-z0-9._-]+", "-", "--".join(parts))
    return key if len(key) <= 200 else f"{key[:180]}--{hashlib.sha256(key.encode()).hexdigest()[:16]}"


class Sources:
    """The folder `sources` below a store's root; nothing is created before the first `hold`."""

    def __init__(self, store_root: Path) -> None:
        self.root = store_root / FOLDER

    @contextlib.contextmanager
    def hold(self, key: str, *, on_wait: Callable[[], None] | None = None) -> Iterator[Held]:
        """The locked folder of `key`, made if need be. While another process has it this waits, after one call of
        `on_wait`; without, it raises TransientError."""
        with disk.mapped("cannot write to the store", self.root, store=True):
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            descriptor = disk.lock_folder(self.root / key, on_wait, busy="another process is fetching this model now")
        try:
            yield Held(key=key, path=self.root / key, lock_fd=descriptor)
        finally:
            os.close(descriptor)

    def describe(self, held: Held, *, source: str, commit: str, files: Mapping[str, Any], kept: bool) -> None:
        """Write source.json. Raises StoreError."""
        text = json.dumps({"schema": SCHEMA, "source": source, "commit": commit, "files": dict(files), "kept": kept},
                          indent=1, sort_keys=True)
        with disk.mapped("cannot write to the store", self.root, store=True):
            disk.replace(held.path / RECORD, text + "\n", draft=held.path / f"{RECORD}.{os.getpid()}")

    def described(self, key: str) -> dict[str, Any] | None:
        """source.json of a folder; None where there is none that can be used."""
        try:
            said = json.loads((self.root / key / RECORD).read_text("utf-8"))
            files = {str(name): {"bytes": int(one["bytes"]), "sha256": one["sha256"], "git_sha1": one["git_sha1"]}
                     for name, one in said["files"].items()}
            known = {"source": str(said["source"]), "commit": str(said["commit"]), "kept": bool(said.get("kept"))}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return {**known, "files": files} if said.get("schema") == SCHEMA else None

    def kept(self, key: str) -> bool:
        """Whether somebody asked to keep this folder."""
        return bool((self.described(key) or {}).get("kept"))

    def finish(self, held: Held) -> None:
        """Delete a folder whose model is stored; the caller holds it."""
        disk.delete(held.path)

    def list(self) -> list[Fetched]:
        """All folders, by key. Raises StoreError when they cannot be read."""
        with disk.mapped("cannot read the store", self.root, store=True):
            if not self.root.is_dir():
                return []
            return [self._fetched(path) for path in sorted(self.root.iterdir()) if path.is_dir()]

    def find(self, source: str) -> Path | None:
        """Where the files of a whole source lie, a folder or the first GGUF file, if they were kept."""
        found = next((one for one in self.list() if one.source == source and one.whole and not one.busy), None)
        return None if found is None else next(iter(sorted(found.path.glob("*.gguf"))), found.path)

    def prune(self, *, wanted: Collection[str] = ()) -> int:
        """Delete the folders that nobody uses, but those of `wanted` sources that somebody asked to keep. Returns the
        bytes freed."""
        freed = 0
        for one in self.list():
            if one.busy or (one.kept and one.source in wanted):
                continue
            with contextlib.suppress(TransientError), self.hold(one.key) as held:
                self.finish(held)
                freed += one.bytes
        return freed

    def _fetched(self, path: Path) -> Fetched:
        said = self.described(path.name) or {"source": "?", "files": {}, "kept": False}
        held = 0
        with contextlib.suppress(FileNotFoundError):  # finished meanwhile
            for file in path.iterdir():
                with contextlib.suppress(FileNotFoundError):  # a part that got its name meanwhile
                    held += file.lstat().st_size if file.name != RECORD else 0
        return Fetched(key=path.name, path=path, source=said["source"], bytes=held, kept=said["kept"],
                       wanted_bytes=sum(file["bytes"] for file in said["files"].values()), busy=disk.is_locked(path))


def held_bytes(sources: Sources) -> int:
    """Disk that fetched sources take, 0 where they cannot be read; for a refusal's text."""
    try:
        return sum(one.bytes for one in sources.list())
    except StoreError:
        return 0
