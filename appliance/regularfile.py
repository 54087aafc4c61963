"""Reading a file of which another account may have made something else: a pipe, a device, an endless one.

Imports nothing that a service under the tightest sandbox cannot load: root's `appliance.workers` uses it too.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, *, most_bytes: int, follow: bool = True) -> bytes:
    """A file's contents, cut after `most_bytes` + 1; never waits for the other end of a pipe. Raises OSError, also for
    what is no regular file; `follow`: through a link in its last place."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    number = os.open(path, flags)
    try:  # `open` would leave a folder's open
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with open(number, "rb", closefd=False) as file:
            return file.read(most_bytes + 1)
    finally:
        os.close(number)
