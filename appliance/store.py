"""The content-addressed store of models: what is in it is whole, or it is not in it.

    objects/DIGEST/   one immutable model folder with manifest.json
    names/NAME        a small file that holds a DIGEST
    prepared/DIGEST-LAYOUT/   an object in the layout that kernels map: a cache, made again when it is missing
    tmp/              drafts and trash; anything here whose lock is free may be deleted

Does: begin -> commit, get, names, verify, remove, prune, sweep. Does not: know what a model is, quantize, or decide
which model is in use. Rules:

- a draft becomes an object by one rename, after every file and folder was written through to the disk;
- an object goes by one rename into tmp/ before anything in it is deleted;
- each draft folder is locked (flock on the folder itself) for as long as its writer *or the writer's child* lives,
  so a killed writer's draft is free and a living one's is never swept;
- names and renames change under one short lock on the root; reading takes no lock and works on a read-only disk;
- every OSError leaves as a one-line StoreError.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import disk, manifest, prepared
from appliance.budget import show
from appliance.errors import ModelError, StoreError, TransientError, UsageError

RESERVED_NAMES = ("default",)
HEADROOM_BYTES = 64 << 20
"""Kept free on the store's disk beyond what a new model needs."""
_AGAIN = "run `applianctl model add` again with its source"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One object: `path` is its folder, `manifest` its manifest.json, `names` the names that point to it."""

    digest: str
    path: Path
    manifest: Mapping[str, Any]
    names: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.manifest["files"].values())


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A locked place to write one object: into `folder`, with `scratch` for the writer's temp files.

    Pass `lock_fd` to a child that writes here: then the lock outlives a killed parent for as long as the child
    still writes. A context manager: leaving it discards whatever was not committed.
    """

    digest: str
    folder: Path
    scratch: Path
    lock_fd: int

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        disk.delete(self.folder.parent)
        os.close(self.lock_fd)


def name_refusal(name: str) -> str | None:
    """Why this cannot be the name of a model, or None."""
    if name in RESERVED_NAMES:
        return f"`{name}` is reserved"
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
        return "a name is 1 to 64 of a-z, 0-9, `.`, `_` and `-`, and begins with a letter or a digit"
    return None


def check_name(name: str) -> None:
    """Raises UsageError when this cannot be the name of a model."""
    reason = name_refusal(name)
    if reason:
        raise UsageError(f"{name!r} cannot be the name of a model", why=reason, do="choose another with --name")


class Store:
    """The store below `root`; nothing is created before the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects = root / "objects"
        self._names = root / "names"
        self._prepared = root / "prepared"
        self._tmp = root / "tmp"

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        return disk.mapped("cannot read the store", self.root)

    def names(self) -> dict[str, str]:
        """Name -> digest, sorted by name. A name whose object is gone is listed too: `get` says so."""
        with self._reading():
            if not self._names.is_dir():
                return {}
            paths = [p for p in sorted(self._names.iterdir()) if name_refusal(p.name) is None and p.is_file()]
            return {p.name: p.read_text(encoding="ascii", errors="replace").strip() for p in paths}

    def digests(self) -> list[str]:
        """All objects, named or not."""
        with self._reading():
            return sorted(p.name for p in self._objects.iterdir()) if self._objects.is_dir() else []

    def has(self, digest: str) -> bool:
        """True when the object is there and every file has its recorded size (`verify` looks at the contents)."""
        with self._reading():
            return not manifest.shape(self._objects / digest)

    def get(self, name: str) -> Stored:
        """The object behind a name. Raises ModelError for an unknown name, StoreError when files lack or shrank."""
        digest = self.pointed(name)
        with self._reading():
            findings = manifest.shape(self._objects / digest)
        if findings:
            raise StoreError(f"the stored model {name!r} is damaged", why=findings[0], do=_AGAIN)
        return self.read(digest)

    def pointed(self, name: str) -> str:
        """The digest a name points to, whatever is there. Raises ModelError for an unknown name."""
        known = self.names()
        if name not in known:
            have = ", ".join(known) or "no model"
            raise ModelError(f"no model is called {name!r}", why=f"{self.root} holds {have}",
                             do="run `applianctl model add SOURCE`")
        return known[name]

    def read(self, digest: str) -> Stored:
        """The object with this digest. Raises StoreError when it is missing or its manifest cannot be read."""
        path = self._objects / digest
        with self._reading():
            said, broken = manifest.read(path)
        if broken:
            raise StoreError(f"the stored model {digest[:12]} is damaged", why=broken, do=_AGAIN)
        names = tuple(name for name, pointed in self.names().items() if pointed == digest)
        return Stored(digest=digest, path=path, manifest=said, names=names)

    def verify(self, digest: str) -> list[str]:
        """One sentence for each damaged file, beginning with its name; nothing when the object is whole."""
        with self._reading():
            return manifest.verify(self._objects / digest)

    def prepared(self, digest: str) -> Path | None:
        """The prepared layout of an object where it is there and whole by its index and size, else None."""
        return None if self.prepared_finding(digest) else self._prepared / prepared.folder_name(digest)

    def prepared_finding(self, digest: str, *, contents: bool = False) -> str | None:
        """Why the prepared layout of an object cannot be used, or None; with `contents` every byte is read."""
        folder = self._prepared / prepared.folder_name(digest)
        with self._reading():
            return _prepared_finding(folder, digest, contents=contents) if folder.is_dir() else "it is not there"

    def begin(self, digest: str, *, need_bytes: int = 0, on_wait: Callable[[], None] | None = None) -> Draft:
        """Open a draft for an object of about `need_bytes`; what an interrupted writer left of it is removed.

        While another process writes the same object this waits, after one call of `on_wait`; without `on_wait` it
        raises TransientError. Look at `has` again afterwards. Raises StoreError when the disk is too full (need and
        free in the text) or cannot be written.
        """
        with disk.mapped("cannot write to the store", self.root):
            self._layout()
            lock_fd = self._lock_draft(digest, on_wait)
            home = self._tmp / digest
            draft = Draft(digest=digest, folder=home / "object", scratch=home / "scratch", lock_fd=lock_fd)
            try:
                for leftover in home.iterdir():
                    disk.delete(leftover)
                self._check_room(need_bytes)
                draft.folder.mkdir()
                draft.scratch.mkdir()
            except BaseException:
                draft.__exit__()
                raise
            return draft

    def commit(
        self, draft: Draft, *, source: str, source_digest: str, recipe: Mapping[str, Any], report: Mapping[str, Any],
        created: str, name: str | None = None,
    ) -> Stored:
        """Make the draft an object, and point `name` to it. An object of this digest that is whole is kept instead.

        `source` says where it came from, `created` is an ISO 8601 time. Raises StoreError, and then neither the
        object nor the name has changed.
        """
        with disk.mapped("cannot write the model to the store", self.root):
            reason = manifest.write(draft.folder, digest=draft.digest, source=source, source_digest=source_digest,
                                    recipe=recipe, report=report, created=created)
            if reason:
                raise StoreError("the new model is not stored", why=reason, do="run `applianctl model add` again")
            disk.seal(draft.folder)
            with self._changing():
                target = self._objects / draft.digest
                if not self.has(draft.digest):
                    if target.exists():  # damaged: the new one takes its place
                        target.rename(self._trash(draft.digest))
                    draft.folder.rename(target)
                    disk.fsync(self._objects)
                if name is not None:
                    self._point(name, draft.digest)
        return self.read(draft.digest)

    def commit_prepared(self, draft: Draft, digest: str) -> Path:
        """Make the draft (begun as `prepared.folder_name(digest)`) the prepared layout of an object; layouts of other
        releases go. Raises StoreError when it is not whole or the object has gone meanwhile."""
        with disk.mapped("cannot write the prepared weights to the store", self.root):
            reason = _prepared_finding(draft.folder, digest, contents=False)
            if reason:
                raise StoreError("the prepared weights are not stored", why=reason, do="try again")
            disk.seal(draft.folder)
            self._prepared.mkdir(mode=0o755, exist_ok=True)
            target = self._prepared / prepared.folder_name(digest)
            trash = []
            with self._changing():
                if not self.has(digest):
                    raise StoreError("the prepared weights are not stored", why="their model has been removed")
                for old in self._prepared.glob(f"{digest}-*"):
                    trash.append(self._trash(old.name))
                    old.rename(trash[-1])
                draft.folder.rename(target)
                disk.fsync(self._prepared)
        for folder in trash:
            disk.delete(folder)
        return target

    def point(self, name: str, digest: str) -> None:
        """Make `name` stand for an object that is there, atomically. Raises UsageError for a bad name."""
        with disk.mapped("cannot write to the store", self.root), self._changing():
            self._point(name, digest)

    def remove(self, name: str, *, in_use: str | None = None, force: bool = False,
               keep: Collection[str] = ()) -> int:
        """Take a name away, and with it every object that no name points to any more, but those to `keep`. Returns the
        bytes freed.

        Raises UsageError for the name `in_use` unless `force`, ModelError for an unknown name.
        """
        self.pointed(name)
        if name == in_use and not force:
            raise UsageError(f"model {name!r} is the one in use",
                             do="choose another with `applianctl model use`, or add --force")
        with disk.mapped("cannot remove the model", self.root), self._changing():
            (self._names / name).unlink(missing_ok=True)
            disk.fsync(self._names)
        return self.prune(keep=keep)

    def prune(self, *, keep: Collection[str] = ()) -> int:
        """Delete the objects that no name points to and that are not to `keep` (digests), and prepared layouts of no
        object. Returns the bytes freed."""
        with disk.mapped("cannot clean the store", self.root):
            trash = []
            with self._changing():
                kept = {*self.names().values(), *keep}
                for digest in self.digests():
                    if digest not in kept:
                        trash.append(self._trash(digest))
                        (self._objects / digest).rename(trash[-1])
                disk.fsync(self._objects)
                wanted = {prepared.folder_name(digest) for digest in kept}
                for folder in self._prepared.iterdir() if self._prepared.is_dir() else ():
                    if folder.name not in wanted:
                        trash.append(self._trash(folder.name))
                        folder.rename(trash[-1])
            freed = sum(p.lstat().st_size for folder in trash for p in folder.rglob("*") if not p.is_dir())
            for folder in trash:
                disk.delete(folder)
            return freed

    def sweep(self) -> list[str]:
        """Delete what interrupted writers left in tmp/; returns its entries. A read-only store is left alone."""
        swept: list[str] = []
        with self._reading():
            if not self._tmp.is_dir() or not os.access(self._tmp, os.W_OK):
                return swept
        with disk.mapped("cannot clean the store", self.root), self._changing():
            for entry in sorted(self._tmp.iterdir()):
                try:
                    descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW)
                except OSError:  # gone by now, or not ours
                    continue
                try:
                    if disk.try_lock(descriptor):
                        disk.delete(entry)
                        swept.append(entry.name)
                finally:
                    os.close(descriptor)
        return swept

    def _layout(self) -> None:
        for folder in (self.root, self._objects, self._names, self._tmp):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._layout()
        with disk.locked(self.root):
            yield

    def _lock_draft(self, digest: str, on_wait: Callable[[], None] | None) -> int:
        home = self._tmp / digest
        while True:
            home.mkdir(mode=0o755, exist_ok=True)
            try:
                descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # swept in between
                continue
            try:
                if not disk.try_lock(descriptor):
                    if on_wait is None:
                        raise TransientError("another process is adding this model now", do="try again when it is done")
                    on_wait()
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                # The lock is on the inode: it counts only if the path still leads there.
                if os.path.samestat(os.fstat(descriptor), home.stat()):
                    return descriptor
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _point(self, name: str, digest: str) -> None:
        check_name(name)
        if not self.has(digest):
            raise StoreError(f"cannot set the name {name!r}", why=f"no object {digest[:12]} in the store", do=_AGAIN)
        disk.replace(self._names / name, digest + "\n", draft=self._tmp / f"name-{os.getpid()}")

    def _trash(self, digest: str) -> Path:
        number = 0
        while (place := self._tmp / f"trash-{os.getpid()}-{number}-{digest}").exists():
            number += 1
        return place

    def _check_room(self, need_bytes: int) -> None:
        free = shutil.disk_usage(self.root).free
        if need_bytes and need_bytes + HEADROOM_BYTES > free:
            need = f"{show(need_bytes)} and {show(HEADROOM_BYTES)} of headroom"
            raise StoreError(f"the disk of {self.root} is too full", why=f"about {need} are needed, "
                             f"{show(free)} are free", do="free some space, or set `store` to another disk")


def _prepared_finding(folder: Path, digest: str, *, contents: bool) -> str | None:
    try:
        text = (folder / prepared.INDEX).read_text("utf-8")
        size = (folder / prepared.WEIGHTS).lstat().st_size
    except PermissionError:
        raise  # not damage: somebody else may read it
    except (OSError, UnicodeDecodeError) as error:
        return f"{folder.name}: {getattr(error, 'strerror', None) or 'not readable as text'}"
    index, broken = prepared.read_index(text)
    if index is None:
        return f"{prepared.INDEX}: {broken}"
    reason = prepared.index_refusal(index, source=digest, weights_bytes=size)
    if reason is None and contents and disk.sha256(folder / prepared.WEIGHTS) != index.sha256:
        reason = f"{prepared.WEIGHTS}: contents changed"
    return reason
