"""The content-addressed store of models: what is in it is whole, or it is not in it.

    objects/DIGEST/   one immutable model folder with manifest.json
    names/NAME        a small file that holds a DIGEST
    prepared/DIGEST-LAYOUT/   an object in the layout that kernels map: a cache, made again when it is missing
    tmp/              drafts and trash; anything here whose lock is free may be deleted
    schema            a small file with the number of this order of things; absent in stores of the first releases

Does: begin -> commit or adopt, get, names, verify, remove, prune, sweep. Does not: know what a model is, quantize, or
decide which model is in use. Rules:

- a draft becomes an object by one rename, after every file and folder was written through to the disk;
- an object goes by one rename into tmp/ before anything in it is deleted;
- each draft folder is locked (flock on the folder itself) for as long as its writer *or the writer's child* lives,
  so a killed writer's draft is free and a living one's is never swept;
- names and renames change under one short lock on the root; reading takes no lock and works on a read-only disk;
- a store that a newer release has written is refused, not guessed at;
- every OSError leaves as a one-line StoreError; a damaged object is a ModelError: no later try helps.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import disk, laidout, manifest, prepared
from appliance.budget import show
from appliance.draft import Draft, open_draft
from appliance.errors import ConfigError, ModelError, StoreError, UsageError

RESERVED_NAMES = ("default",)
HEADROOM_BYTES = 64 << 20
"""Kept free on the store's disk beyond what a new model needs."""
SCHEMA = 1
"""Raise it when an older release could misread what is stored."""


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

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with disk.mapped("cannot read the store", self.root, store=True):
            self._check_schema()
            yield

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
        """The object behind a name. Raises ModelError for an unknown name, or when files lack or shrank."""
        digest = self.pointed(name)
        with self._reading():
            findings = manifest.shape(self._objects / digest)
        if findings:
            raise damaged(name, findings[0])
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
        """The object with this digest. Raises ModelError when it is missing or its manifest cannot be read."""
        path = self._objects / digest
        with self._reading():
            said, broken = manifest.read(path)
        names = tuple(name for name, pointed in self.names().items() if pointed == digest)
        if broken:
            raise damaged(names[0] if names else digest[:12], broken)
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
            return laidout.finding(folder, digest, contents=contents) if folder.is_dir() else "it is not there"

    def prepared_folder(self, digest: str) -> Path:
        """Where the prepared layout of an object is, if there is one."""
        return self._prepared / prepared.folder_name(digest)

    def begin(self, digest: str, *, need_bytes: int = 0, on_wait: Callable[[], None] | None = None) -> Draft:
        """Open a draft for an object of about `need_bytes`; what an interrupted writer left of it is removed.

        While another process writes the same object this waits, after one call of `on_wait`; without `on_wait` it
        raises TransientError. Look at `has` again afterwards. Raises StoreError when the disk is too full (need and
        free in the text) or cannot be written.
        """
        with disk.mapped("cannot write to the store", self.root, store=True):
            self._layout()
            return open_draft(self._tmp, digest, check_room=lambda: self._check_room(need_bytes), on_wait=on_wait)

    def commit(
        self, draft: Draft, *, source: str, source_digest: str, recipe: Mapping[str, Any], report: Mapping[str, Any],
        created: str, name: str | None = None, replace: bool = False,
    ) -> Stored:
        """Make the draft an object, and point `name` to it. An object of this digest that is whole by its sizes is kept
        instead, unless `replace`: then the draft takes its place.

        `source` says where it came from, `created` is an ISO 8601 time. Raises StoreError, and then neither the
        object nor the name has changed.
        """
        with disk.mapped("cannot write the model to the store", self.root, store=True):
            reason = manifest.write(draft.folder, digest=draft.digest, source=source, source_digest=source_digest,
                                    recipe=recipe, report=report, created=created)
            if reason:
                raise StoreError("the new model is not stored", why=reason, do="run `applianctl model add` again")
            self._put(draft, name, replace=replace)
        return self.read(draft.digest)

    def adopt(self, draft: Draft, *, name: str, replace: bool = False) -> Stored:
        """As `commit`, for a draft that brings its own manifest: what another store has committed. Its contents were
        checked by whoever wrote it."""
        with disk.mapped("cannot write the model to the store", self.root, store=True):
            said, broken = manifest.read(draft.folder)
            findings = [broken] if broken else manifest.shape(draft.folder)
            if not findings and said.get("digest") != draft.digest:
                findings = [f"{manifest.MANIFEST}: it belongs to another model"]
            if findings:
                raise ModelError("the model is not stored", why=findings[0])
            self._put(draft, name, replace=replace)
        return self.read(draft.digest)

    def commit_prepared(self, draft: Draft, digest: str) -> Path:
        """Make the draft (begun as `prepared.folder_name(digest)`) the prepared layout of an object; layouts of other
        releases go. Raises StoreError when it is not whole or the object has gone meanwhile."""
        with disk.mapped("cannot write the prepared weights to the store", self.root, store=True):
            reason = laidout.finding(draft.folder, digest, contents=False)
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

    def discard_prepared(self, digest: str) -> None:
        """Throw the prepared layout of an object away, to be made again."""
        with disk.mapped("cannot clean the store", self.root, store=True), self._changing():
            folder = self.prepared_folder(digest)
            if folder.is_dir():
                trash = self._trash(folder.name)
                folder.rename(trash)
                disk.delete(trash)

    def point(self, name: str, digest: str) -> None:
        """Make `name` stand for an object that is there, atomically. Raises UsageError for a bad name."""
        with disk.mapped("cannot write to the store", self.root, store=True), self._changing():
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
        with disk.mapped("cannot remove the model", self.root, store=True), self._changing():
            (self._names / name).unlink(missing_ok=True)
            disk.fsync(self._names)
        return self.prune(keep=keep)

    def prune(self, *, keep: Collection[str] = ()) -> int:
        """Delete the objects that no name points to and that are not to `keep` (digests), and prepared layouts of no
        object. Returns the bytes freed."""
        with disk.mapped("cannot clean the store", self.root, store=True):
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
            freed = sum(map(disk.bytes_below, trash))
            for folder in trash:
                disk.delete(folder)
            return freed

    def sweep(self) -> list[str]:
        """Delete what interrupted writers left in tmp/; returns its entries. A read-only store is left alone."""
        swept: list[str] = []
        with self._reading():
            if not self._tmp.is_dir() or not os.access(self._tmp, os.W_OK):
                return swept
        with disk.mapped("cannot clean the store", self.root, store=True), self._changing():
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
        self._check_schema()
        for folder in (self.root, self._objects, self._names, self._tmp):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not (self.root / "schema").exists():
            disk.replace(self.root / "schema", f"{SCHEMA}\n", draft=self.root / f".schema-{os.getpid()}")

    def _check_schema(self) -> None:
        """Raises ConfigError for a store of a newer release: what is in it may mean something else."""
        file = self.root / "schema"
        try:
            found = int(file.read_text(encoding="ascii"))
        except (FileNotFoundError, NotADirectoryError):
            return  # written by one of the first releases, or not at all
        except ValueError:
            raise StoreError(f"the store {self.root} cannot be used", why="its file `schema` holds no number",
                             do=f"remove {file}: it is written again") from None
        if found > SCHEMA:
            raise ConfigError(f"the store {self.root} was written by a newer release",
                              why=f"its schema is {found}, this release knows {SCHEMA}",
                              do="install that release again, or set `store` to another folder")

    def _put(self, draft: Draft, name: str | None, *, replace: bool) -> None:
        disk.seal(draft.folder)
        with self._changing():
            target = self._objects / draft.digest
            if not target.exists():
                draft.folder.rename(target)
            elif replace or not self.has(draft.digest):
                disk.exchange(draft.folder, target)  # the damaged one goes with the draft
            disk.fsync(self._objects)
            if name is not None:
                self._point(name, draft.digest)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._layout()
        with disk.locked(self.root):
            yield

    def _point(self, name: str, digest: str) -> None:
        check_name(name)
        if not self.has(digest):
            raise StoreError(f"cannot set the name {name!r}", why=f"no object {digest[:12]} in the store", do="add it")
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


def damaged(name: str, finding: str, *, do: str = "") -> ModelError:
    """What is said of a stored model with a finding."""
    return ModelError(f"the stored model {name!r} is damaged", why=finding,
                      do=do or f"run `applianctl model repair {name}`")
