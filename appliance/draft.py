"""A draft: a locked place in the store's tmp/ where one object is written.

Does: take the lock, wait for another writer, clear what an interrupted one left, discard what was not committed. Does
not: commit (`appliance.store` does). Rule: the lock is a flock on the folder itself and ends with its last holder, the
writer or the writer's child; whoever holds it may delete everything inside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from appliance import disk


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


def open_draft(tmp: Path, digest: str, *, check_room: Callable[[], None], on_wait: Callable[[], None] | None) -> Draft:
    """Open the draft `tmp/DIGEST`. `check_room` raises when the disk is too full; it is asked when the leftovers of an
    interrupted writer are gone. Waits for another writer after one call of `on_wait`; without it TransientError."""
    lock_fd = disk.lock_folder(tmp / digest, on_wait, busy="another process is adding this model now")
    home = tmp / digest
    draft = Draft(digest=digest, folder=home / "object", scratch=home / "scratch", lock_fd=lock_fd)
    try:
        for leftover in home.iterdir():
            disk.delete(leftover)
        check_room()
        draft.folder.mkdir()
        draft.scratch.mkdir()
    except BaseException:
        draft.__exit__()
        raise
    return draft
