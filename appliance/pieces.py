"""PURE: the digests of a file: SHA-256 of all of it, and of each of its pieces of 16 MiB.

With the digest of a piece a part of a large file can be checked for the price of that part. Does not: open a file.
Rule: a file of one piece has no list; its digest is the piece's.
"""

from __future__ import annotations

import hashlib

PIECE_BYTES = 16 << 20


class Digests:
    """Fed with all bytes of one file, in order, in blocks of any size."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole = hashlib.sha256()
        self._piece = hashlib.sha256()
        self._pieces: list[str] = []

    def update(self, block: bytes | memoryview) -> None:
        self._whole.update(block)
        rest = memoryview(block)
        while rest:
            room = PIECE_BYTES - self.bytes % PIECE_BYTES
            self._piece.update(rest[:room])
            self.bytes += len(rest[:room])
            rest = rest[room:]
            if self.bytes % PIECE_BYTES == 0:
                self._pieces.append(self._piece.hexdigest())
                self._piece = hashlib.sha256()

    @property
    def whole(self) -> str:
        return self._whole.hexdigest()

    @property
    def pieces(self) -> tuple[str, ...]:
        """In the order of the file; empty for a file of at most one piece."""
        if self.bytes <= PIECE_BYTES:
            return ()
        rest = (self._piece.hexdigest(),) if self.bytes % PIECE_BYTES else ()
        return (*self._pieces, *rest)


def count(size: int) -> int:
    """How many digests the list for a file of `size` bytes has."""
    return -(-size // PIECE_BYTES) if size > PIECE_BYTES else 0
