"""Writing that lasts: locks, write-through, deletion and the mapping of disk errors. Linux file systems only.

Does not know what is written. Rules: a lock is a flock on an open descriptor and ends with the last copy of it;
an OSError of these functions is mapped by the caller with `mapped`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from appliance.errors import StoreError, TransientError
from appliance.pieces import Digests

LOOKS, LOOK_S = 20, 0.01
BLOCK_BYTES = 4 << 20
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of <fcntl.h> and <linux/fs.h>."""


def sha256(path: Path) -> str:
    """SHA-256 of a file's contents, 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests(path: Path) -> Digests:
    """The digests of a file and of its pieces, read once."""
    found = Digests()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            found.update(block)
    return found


def write_all(file: IO[bytes], block: bytes | memoryview) -> None:
    """Write a whole block to an unbuffered file."""
    rest = memoryview(block)
    while rest:
        rest = rest[file.write(rest):]


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock if nobody holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_folder(path: Path, on_wait: Callable[[], None] | None, *, busy: str) -> int:
    """Make a folder if need be and lock it; returns the descriptor that holds the lock. While another process has it
    this waits, after one call of `on_wait`; without, it raises TransientError that says `busy`."""
    told = False
    while True:
        path.mkdir(mode=0o755, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # deleted in between
            continue
        try:
            if not _lock_soon(descriptor):
                if on_wait is None:
                    raise TransientError(busy, do="try again when it is done")
                if not told:
                    on_wait()
                told = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The lock is on the inode: it counts only if the path still leads there.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock_soon(descriptor: int) -> bool:
    """Whether the lock was had within moments: who only asks whether it is held (`is_locked`) has it for an instant."""
    for _ in range(LOOKS):
        if try_lock(descriptor):
            return True
        time.sleep(LOOK_S)
    return False


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock of a folder or file now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # gone by now, or not ours
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def bytes_below(path: Path) -> int:
    """Disk that a file, or all files below a folder, take: a file with holes counts what it holds, and what vanishes
    meanwhile nothing."""
    files = [Path(folder) / name for folder, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found = file.lstat()
            total += min(found.st_size, 512 * found.st_blocks)
    return total


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock on an existing folder; waits for it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a file or a whole folder; what is gone already is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def exchange(one: Path, other: Path) -> None:
    """Let two folders of one file system change places: at every moment each path leads to one of them, except where
    the file system cannot do that (NFS)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(one))
    aside = one.with_name(f"{one.name}.aside")
    other.rename(aside)
    one.rename(other)
    aside.rename(one)


def fsync(path: Path) -> None:
    """Write a file, or the entries of a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path) -> None:
    """Make every file read-only and write everything through, deepest first, the folder itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if not path.is_dir():
            path.chmod(0o444)
        fsync(path)
    folder.chmod(0o755)
    fsync(folder)


def replace(path: Path, text: str, *, draft: Path) -> None:
    """Write a small file so that a reader sees the old text or the new one: `draft`, fsync, rename, fsync."""
    try:
        draft.write_text(text, encoding="utf-8")
        fsync(draft)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    fsync(path.parent)


@contextlib.contextmanager
def mapped(what: str, place: Path, *, store: bool = False) -> Iterator[None]:
    """Turn an OSError into a StoreError that says `what` did not work at `place`, why, and what to do. `store`: the
    place is the store, which a setting can move; no other folder can be moved so."""
    try:
        yield
    except OSError as error:
        at = error.filename or place
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why, do = "the disk is full", "free some space" if store else f"free some space on the disk of {place}"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            why, do = f"{at}: {error.strerror}", "check its owner and mount" if store else \
                f"check owner and mount of {place}"
        else:
            why, do, store = error.strerror or str(error), f"look at {at}", False
        raise StoreError(what, why=why, do=f"{do}, or set `store` to another disk" if store else do) from None
