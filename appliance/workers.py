"""The worker's installed versions: the one to use, those that may be needed, and the end of the others.

A package puts each version into a folder of its own, TREES/VERSION, and points LINK at the newest; the agent tries that
one and can go back to the one before, because both are there. Does: resolve the link, tell what the record still needs,
remove the rest (as root: `python -m appliance.workers`, started by appliance-old-workers.path when the agent has called
`settled`). Does not: install, or decide which version serves. Rules:

* The link's target, the last good version and the one on trial stay; with a record that cannot be read, all stay.
* The record belongs to another account: it is read as data, bounded, not where it is a link, and its words are compared
  with names of folders, never used as a path.
* Only folders go; what is a link, or begins with a dot (the package's own work), stays. One that goes loses its name
  first, or its interpreter: half of a version is never run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from appliance.regularfile import read_regular

LINK = Path("/usr/lib/appliance/worker")
TREES = Path("/usr/lib/appliance/workers")
RECORD = Path("/var/lib/appliance/state/record.json")
PYTHON = "bin/python"
LOCK, GOING = ".lock", ".going-"
SETTLED = "worker-settled"
"""A file in the runtime folder, written anew when no trial is open: what is old may go."""
MAX_RECORD_BYTES = 16 << 20


def resolved(python: str) -> str:
    """The interpreter by the folder of its version: LINK/bin/python -> TREES/VERSION/bin/python. Another path stays as
    it is, and so does one whose folder is no link."""
    place = Path(python)
    home = place.parent.parent
    return str(home.resolve() / PYTHON) if place.parts[-2:] == ("bin", "python") and home.is_symlink() else python


def lost_interpreter(python: str) -> str | None:
    """Where a worker is installed whose interpreter is gone from this node, the name of that interpreter."""
    place = Path(python)
    return str(place.readlink()) if place.is_symlink() and not place.exists() else None


def settled(runtime: Path) -> None:
    """Say that no trial is open. A disk that refuses is no reason to stop: it is said again at the next start."""
    with contextlib.suppress(OSError):
        (runtime / SETTLED).write_text("")


def superfluous(trees: Path, link: Path, record: Path) -> list[Path]:
    """The folders that nothing needs any more."""
    known = _record(record)
    if known is None or not link.is_symlink():
        return []
    pythons = {_python(known.get("good")), _python((known.get("trial") or {}).get("candidate"))}
    newest, home = link.resolve(), trees.resolve()  # as `resolved` writes it: a folder above may be a link
    return sorted(tree for tree in home.iterdir()
                  if tree.is_dir() and not tree.is_symlink() and not tree.name.startswith(".")
                  and tree != newest and str(tree / PYTHON) not in pythons)


def remove(trees: Path, link: Path, record: Path) -> None:
    """Remove what is superfluous, and what an earlier removal left when it was interrupted. Raises OSError."""
    for tree in superfluous(trees, link, record):
        print(f"removing the worker {tree.name}: it is not needed any more", flush=True)
        try:
            tree.rename(tree.with_name(GOING + tree.name))
        except OSError as error:
            if error.errno != errno.EXDEV:  # a lower layer of an overlay, where no folder can be renamed
                raise
            (tree / PYTHON).unlink(missing_ok=True)
            shutil.rmtree(tree)
    for tree in trees.glob(GOING + "*"):
        shutil.rmtree(tree)


def main() -> int:
    if not TREES.is_dir():  # no package has put a worker here
        return 0
    with open(TREES / LOCK, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            remove(TREES, LINK, RECORD)
        except OSError as error:
            print(f"an old worker could not be removed: {error}; it is tried again later", file=sys.stderr)
            return 73
    return 0


def _record(path: Path) -> dict[str, Any] | None:
    """What the agent remembers; empty where it remembers nothing, None where that cannot be told: a folder that is
    not there may be one that is not mounted."""
    try:
        data = read_regular(path, most_bytes=MAX_RECORD_BYTES, follow=False)
    except FileNotFoundError:
        return {} if path.parent.is_dir() else None
    except OSError:
        return None
    try:
        tree = json.loads(data) if len(data) <= MAX_RECORD_BYTES else None
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) and isinstance(tree.get("trial") or {}, dict) else None


def _python(candidate: Any) -> str | None:
    found = candidate.get("worker_python") if isinstance(candidate, dict) else None
    return found if isinstance(found, str) else None


if __name__ == "__main__":
    sys.exit(main())
