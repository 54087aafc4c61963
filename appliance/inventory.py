"""What the store holds, how large it is, and what keeps each part alive: names, the service, what it may go back to.

Does: list, and clean what nothing keeps. Does not: decide what a name is for. Rules: an object stays while a name
points to it, while the record has it as good, previous or on trial, or while it is served, damaged or not; drafts and
fetched sources of a living process are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance import disk, manifest, prepared, record, status
from appliance.directories import Directories
from appliance.sources import Fetched, Sources
from appliance.store import Store


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One object. `bytes`: of its files; `layout_bytes`: of its prepared layout; `kept_by`: empty: nothing does."""

    digest: str
    bytes: int
    layout_bytes: int
    kept_by: tuple[str, ...]
    created: str
    source: str
    damaged: str


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """`drafts`: entry of tmp/ -> bytes; `living`: those a process writes; `layouts`: prepared folders of no object, or
    of another release."""

    holdings: tuple[Holding, ...]
    drafts: Mapping[str, int]
    living: frozenset[str]
    layouts: Mapping[str, int]
    sources: tuple[Fetched, ...]


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    """What `clean` takes away, or would: `(what, bytes)`."""

    parts: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.parts)


def keepers(store: Store, directories: Directories) -> dict[str, tuple[str, ...]]:
    """Digest -> what keeps it: its names first."""
    found = {digest: list(reasons) for digest, reasons in needed(directories).items()}
    for name, digest in reversed(store.names().items()):
        found.setdefault(digest, []).insert(0, name)
    return {digest: tuple(reasons) for digest, reasons in found.items()}


def needed(directories: Directories) -> dict[str, tuple[str, ...]]:
    """Digest -> why the service needs it, or may need it again, whatever its names."""
    found: dict[str, list[str]] = {}
    known = record.load(directories.state, keep=True)
    on_trial = known.trial.candidate if known.trial is not None else None
    for reason, candidate in (("good", known.good), ("the good one before", known.previous), ("on trial", on_trial)):
        if candidate is not None and candidate.digest:
            found.setdefault(candidate.digest, []).append(f"({reason})")
    served = (status.current(directories.runtime) or {}).get("digest")
    if isinstance(served, str):
        found.setdefault(served, []).append("(served now)")
    return {digest: tuple(reasons) for digest, reasons in found.items()}


def look(store: Store, directories: Directories) -> Inventory:
    """Read names, manifests and sizes; no contents. Raises StoreError."""
    kept = keepers(store, directories)
    digests = store.digests()
    with disk.mapped("cannot read the store", store.root, store=True):
        layouts = {p.name: disk.bytes_below(p) for p in _entries(store.root / "prepared")}
        own = {digest: layouts.pop(prepared.folder_name(digest), 0) for digest in digests}
        holdings = tuple(_holding(store.root / "objects" / digest, own[digest], kept.get(digest, ()))
                         for digest in digests)
        drafts = {p.name: disk.bytes_below(p) for p in _entries(store.root / "tmp")}
        living = frozenset(p.name for p in _entries(store.root / "tmp") if disk.is_locked(p))
    return Inventory(holdings=holdings, drafts=drafts, living=living, layouts=layouts,
                     sources=tuple(Sources(store.root).list()))


def plan_cleaning(found: Inventory) -> Cleaning:
    """What nothing keeps."""
    parts = [(f"draft {name[:40]}", size) for name, size in found.drafts.items() if name not in found.living]
    parts += [(f"model {one.digest[:12]} ({one.source or 'unknown source'})", one.bytes + one.layout_bytes)
              for one in found.holdings if not one.kept_by]
    parts += [(f"layout {name[:12]} that nobody maps", size) for name, size in found.layouts.items()]
    wanted = _wanted(found)
    parts += [(f"fetched source {one.source}", one.bytes) for one in found.sources
              if not (one.busy or (one.kept and one.source in wanted))]
    return Cleaning(parts=tuple(parts))


def clean(store: Store, directories: Directories) -> Cleaning:
    """Take away what nothing keeps; returns it. Raises StoreError."""
    found = look(store, directories)
    planned = plan_cleaning(found)
    store.sweep()
    store.prune(keep=keepers(store, directories).keys())
    Sources(store.root).prune(wanted=_wanted(found))
    return planned


def _wanted(found: Inventory) -> set[str]:
    """The sources of models that stay: files of theirs that were to be kept are."""
    return {one.source for one in found.holdings if one.kept_by}


def _holding(folder: Path, layout_bytes: int, kept_by: tuple[str, ...]) -> Holding:
    said, broken = manifest.read(folder)
    findings = [broken] if broken else manifest.shape(folder)
    return Holding(digest=folder.name, bytes=disk.bytes_below(folder), layout_bytes=layout_bytes, kept_by=kept_by,
                   created=str(said.get("created", "")), source=str(said.get("source", "")),
                   damaged=findings[0] if findings else "")


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
