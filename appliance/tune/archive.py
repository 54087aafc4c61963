"""Where measurements are kept: `state/measured/FINGERPRINT.json`, and earlier ones beside it.

Does: load the record of this host with what has made it stale, save one atomically, keep the last few that were
replaced, keep the record behind each decision that a worker was started with (`served/`), so that it can be returned
to, and what the operator asked for with `tune --apply` (`applied`). Does not: measure, or decide. Rule: a file that
cannot be read is no record, not an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance import disk, measured
from appliance.directories import ensure
from appliance.errors import TransientError, UsageError
from appliance.facts import HostFacts
from appliance.measured import Record

FOLDER, EARLIER, SERVED, APPLIED = "measured", "earlier", "served", "applied"
KEPT = 20
"""Earlier records, and served ones, that are kept."""


@contextlib.contextmanager
def only_one(state: Path) -> Iterator[None]:
    """Hold the measurements' lock: two runs at once would measure each other. Raises TransientError."""
    folder = ensure(state / FOLDER)
    with disk.mapped("cannot measure", folder), open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TransientError("another `applianctl tune` is running", why="two would measure each other",
                                 do="wait for it") from None
        yield


def load(state: Path, host: HostFacts, *, root: Path = Path("/")) -> Record | None:
    """The record of this host, `stale` filled in; None when nothing was measured."""
    return _judged(read(_file(state, host.fingerprint)), host, root)


def current(state: Path, host: HostFacts, *, root: Path = Path("/")) -> Record:
    """The record to add trials to: the one that is there while it is fresh, else a new one."""
    record = load(state, host, root=root)
    if record is not None and not record.stale:
        return record
    return Record(fingerprint=host.fingerprint, inputs=measured.inputs(host, microcode=microcode(root)))


def save(state: Path, record: Record) -> None:
    """Replace the record of this fingerprint; one of other inputs is kept beside it. Raises StoreError."""
    folder = ensure(state / FOLDER)
    file = _file(state, record.fingerprint)
    before = read(file)
    if before is not None and before.inputs != record.inputs:
        set_aside(state, before)
    with disk.mapped("cannot keep the measurements", folder):
        draft = file.with_suffix(".draft")
        draft.write_text(measured.write(replace(record, stale=())))
        draft.chmod(0o644)
        draft.replace(file)


def set_aside(state: Path, record: Record) -> None:
    """Keep a record that is about to be replaced, under the time of its last trial."""
    folder = ensure(state / FOLDER / EARLIER)
    at = max((trial.at for trial in record.trials), default=0.0)
    name = f"{record.fingerprint}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime(at))}.json"
    _bounded(folder, name, measured.write(record))


def keep(state: Path, record: Record, *, digest: str, figures: Mapping[str, Any]) -> None:
    """Keep the record that led to this decision for this model: a worker starts with it. The rules of thumb need none.
    Raises StoreError."""
    if figures:
        _bounded(ensure(state / FOLDER / SERVED), f"{measured.decision(digest, figures)}.json", measured.write(record))


def kept(state: Path, host: HostFacts, *, digest: str, figures: Mapping[str, Any],
         root: Path = Path("/")) -> Record | None:
    """The record that led to this decision, `stale` filled in; None where it decided nothing, or is not there."""
    file = state / FOLDER / SERVED / f"{measured.decision(digest, figures)}.json"
    return _judged(read(file), host, root) if figures else None


def apply(state: Path, *, digest: str, figures: Mapping[str, Any]) -> None:
    """The operator wants this decision on trial now. Raises StoreError."""
    folder = ensure(state / FOLDER)
    with disk.mapped("cannot stage the measurements", folder):
        draft = folder / f".{APPLIED}"
        draft.write_text(measured.decision(digest, figures) + "\n")
        draft.chmod(0o644)
        draft.replace(folder / APPLIED)


def applied(state: Path) -> str:
    """The decision that the operator asked for last (`measured.decision`); empty when there was none."""
    try:
        return (state / FOLDER / APPLIED).read_text("utf-8")[:64].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def names(state: Path) -> list[Path]:
    """All records, the present ones first."""
    folder = state / FOLDER
    return [*sorted(folder.glob("*.json")), *sorted((folder / EARLIER).glob("*.json"), reverse=True)]


def before(state: Path, record: Record) -> Record | None:
    """The latest record of this machine with other software, to compare with; None when there is none."""
    found = [other for other in map(read, names(state)) if other is not None and measured.comparable(other, record)]
    return max(found, key=lambda other: max((trial.at for trial in other.trials), default=0.0), default=None)


def lost(state: Path, record: Record, *, loss_pct: float) -> str:
    """What has become slower since the software changed, and what changed; empty when nothing has, by `loss_pct`."""
    earlier = before(state, record)
    found = [] if earlier is None else list(measured.slower(earlier, record, loss_pct=loss_pct))
    if earlier is None or not found:
        return ""
    return f"slower since {', '.join(measured.changes(earlier.inputs, record.inputs))}: {'; '.join(found)}"


def named(state: Path, name: str) -> Record:
    """A record by its file, its name, or the beginning of it. Raises UsageError when there is none, or several."""
    paths = [path for path in names(state) if path.stem == name] or [p for p in names(state) if p.stem.startswith(name)]
    if Path(name).is_file():
        paths = [Path(name)]
    if len(paths) != 1 or (record := read(paths[0])) is None:
        known = ", ".join(path.stem for path in names(state)) or "none"
        raise UsageError(f"no measurements are called {name!r}" if len(paths) != 1 else f"{paths[0]} cannot be read",
                         why=f"known are {known}", do="run `applianctl tune show`")
    return record


def read(file: Path) -> Record | None:
    try:
        return measured.read(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def microcode(root: Path) -> str | None:
    """The first processor's microcode revision, as the kernel names it."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("microcode"):
                return line.partition(":")[2].strip() or None
    return None


def settled(state: Path) -> None:
    """What the operator asked for has passed its trial: nothing is asked for any more."""
    with contextlib.suppress(OSError):
        (state / FOLDER / APPLIED).unlink()


def _judged(record: Record | None, host: HostFacts, root: Path) -> Record | None:
    """The record with what has made it stale."""
    if record is None:
        return None
    return replace(record, stale=measured.changes(record.inputs, measured.inputs(host, microcode=microcode(root))))


def _bounded(folder: Path, name: str, text: str) -> None:
    """Write a file, and let only the latest KEPT of them stay."""
    with disk.mapped("cannot keep the measurements", folder):
        draft = folder / f".{name}"
        draft.write_text(text)
        draft.replace(folder / name)
        for old in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()


def _file(state: Path, fingerprint: str) -> Path:
    return state / FOLDER / f"{fingerprint}.json"
