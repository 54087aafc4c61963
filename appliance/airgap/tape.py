"""A tar file as a bundle needs it: plain files, one after the other, each known beforehand.

Does: write a member's header and padding, read one member after the other. Does not: decide which members there are.
Rules: the bytes depend on names, sizes and contents alone (no time, no owner), so any tar can list the file; reading
knows plain files only: links, devices, folders, long names and sparse files are refused by their header, and no header
makes it read or keep more than a block. tarfile itself reads the headers, but not more: it follows what they say.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import IO

from appliance.airgap.content import refused
from appliance.errors import ModelError

BLOCK = tarfile.BLOCKSIZE
CHUNK_BYTES = 4 << 20
END = bytes(2 * BLOCK)
LONGEST_NAME = 100


def header(name: str, size: int) -> bytes:
    """The block before a member's contents."""
    if len(name.encode()) > LONGEST_NAME:
        raise ModelError(f"{name} cannot be put into a bundle", why=f"its name is longer than {LONGEST_NAME} bytes")
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def padding(size: int) -> bytes:
    """What follows a member's contents."""
    return bytes(-size % BLOCK)


def length(sizes: Iterator[int]) -> int:
    """Bytes of a whole file with members of these sizes."""
    return sum(BLOCK + size + len(padding(size)) for size in sizes) + len(END)


class Reader:
    """Reads `file` from its present position on: `next`, then all of `contents`, then `next` again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def next(self) -> tuple[str, int] | None:
        """Name and size of the next member; None at the end. Raises ModelError."""
        block = self._exactly(BLOCK)
        if block == bytes(BLOCK):
            return None
        try:
            found = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, UnicodeError, ValueError, OverflowError):
            raise refused("it is no tar file, or damaged") from None
        if not found.isreg() or found.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or found.size < 0:
            raise refused(f"{found.name[:100]!r} is not a plain file")
        return found.name, found.size

    def contents(self, size: int) -> Iterator[bytes]:
        """The contents of the member that `next` has named, in blocks."""
        rest = size
        while rest:
            block = self._exactly(min(rest, CHUNK_BYTES))
            rest -= len(block)
            yield block
        self._exactly(len(padding(size)))

    def _exactly(self, size: int) -> bytes:
        try:
            block = self._file.read(size)
        except OSError as error:
            raise refused(f"it cannot be read: {error.strerror}", "look at the stick or disk") from None
        if len(block) != size:
            raise refused("it is cut short")
        return block
