"""Where measurements are kept: `state/measured/FINGERPRINT.json`, and earlier ones beside it.

Does: load the record of this host with what has made it stale, save one atomically, keep the last few that were
replaced, keep the record behind each decision that a worker was started with (`served/`), so that it can be returned
to, and what the operator asked for with `tune --apply` (`applied`). Does not: measure, or decide. Rules: a file that
cannot be read is a record without figures that says so (`damaged`), not an error, and the next one saved takes its
place; nobody waits for what is no file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from appliance import disk, measured
from appliance.directories import ensure
from appliance.errors import StoreError, TransientError, UsageError
from appliance.facts import HostFacts
from appliance.measured import Record
from appliance.regularfile import read_regular

FOLDER, EARLIER, SERVED, APPLIED = "measured", "earlier", "served", "applied"
KEPT = 20
"""Earlier records, and served ones, that are kept."""
MOST_BYTES = 16 << 20


@contextlib.contextmanager
def only_one(state: Path) -> Iterator[None]:
    """Hold the measurements' lock: two runs at once would measure each other. Raises TransientError, and StoreError
    where nothing could be kept."""
    folder = ensure(state / FOLDER)
    if not os.access(folder, os.W_OK, effective_ids=True):  # told before it measures for minutes
        raise StoreError("cannot measure", why=f"{folder} is not writable", do=f"check owner and mount of {folder}")
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    with disk.mapped("cannot measure", folder), open(os.open(folder / ".lock", flags, 0o644), "r+b", 0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TransientError("another `applianctl tune` is running", why="two would measure each other",
                                 do="wait for it") from None
        yield


def load(state: Path, host: HostFacts, *, root: Path = Path("/")) -> Record | None:
    """The record of this host, `stale` filled in; None when nothing was measured."""
    return _judged(_file(state, host.fingerprint), host, root)


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
        if file.is_dir() and not file.is_symlink():  # nothing else is in the way of a new file
            file.replace(file.with_suffix(".bad"))
        _put(file, measured.write(replace(record, stale=())))


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
    return _judged(file, host, root) if figures else None


def apply(state: Path, *, digest: str, figures: Mapping[str, Any]) -> None:
    """The operator wants this decision on trial now. Raises StoreError."""
    folder = ensure(state / FOLDER)
    with disk.mapped("cannot stage the measurements", folder):
        _put(folder / APPLIED, measured.decision(digest, figures) + "\n")


def applied(state: Path) -> str:
    """The decision that the operator asked for last (`measured.decision`); empty when there was none."""
    try:
        return read_regular(state / FOLDER / APPLIED, most_bytes=64).decode("utf-8").strip()
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
    if len(paths) != 1:
        known = ", ".join(path.stem for path in names(state)) or "none"
        raise UsageError(f"no measurements are called {name!r}", why=f"known are {known}",
                         do="run `applianctl tune show`")
    record, damage = look(paths[0])
    if record is None:
        raise StoreError(damage or f"{paths[0]} is not there any more", do="name other measurements")
    return record


def look(file: Path) -> tuple[Record | None, str]:
    """The record in a file, and what is wrong with it, as a sentence; neither where there is none."""
    try:
        data = read_regular(file, most_bytes=MOST_BYTES)
        text = data.decode("utf-8") if len(data) <= MOST_BYTES else ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{file} cannot be read: {error.strerror or error}"
    except UnicodeDecodeError:
        text = ""
    record = measured.read(text)
    return record, "" if record is not None else f"{file} is damaged, or another release wrote it"


def read(file: Path) -> Record | None:
    return look(file)[0]


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


def _judged(file: Path, host: HostFacts, root: Path) -> Record | None:
    """The record with what has made it stale; one without figures where the file is damaged."""
    record, damage = look(file)
    if damage:
        return Record(fingerprint=host.fingerprint, inputs={}, stale=(damage,), damaged=damage)
    if record is None:
        return None
    return replace(record, stale=measured.changes(record.inputs, measured.inputs(host, microcode=microcode(root))))


def _bounded(folder: Path, name: str, text: str) -> None:
    """Write a file, and let only the latest KEPT of them stay."""
    with disk.mapped("cannot keep the measurements", folder):
        _put(folder / name, text)
        files = [path for path in folder.glob("*.json") if path.is_file()]
        for old in sorted(files, key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink()


def _put(file: Path, text: str) -> None:
    """Replace a file in one step, to be read by everybody whatever the umask; what another left in the draft's place
    goes."""
    draft = file.with_name(f".{file.stem}.draft")  # never found by its suffix
    draft.unlink(missing_ok=True)
    draft.touch()
    draft.chmod(0o644)
    disk.replace(file, text, draft=draft)


def _file(state: Path, fingerprint: str) -> Path:
    return state / FOLDER / f"{fingerprint}.json"
