"""A request's body: read in pieces, bounded in size and time, held while its request waits, let go as it is sent on.

All bodies together are bounded too (the shelf), so that many large requests cannot fill the agent's memory; that of a
request the worker has is not held any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from aiohttp import web

from appliance.front.words import Refusal

BODY_S = 60.0
"""How long a client may take to send its body."""
HELD_BYTES = 64 * 1024**2
"""On the shelf at most; one body of the largest size always fits."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ShelfFull(Exception):
    """Too many bytes of bodies wait already."""


class Shelf:
    """The bytes of all bodies that wait."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def has_room(self, more: int, *, largest: int) -> bool:
        return self.held_bytes + more <= max(HELD_BYTES, largest)


class Body:
    """One body. `size_bytes`: as it was read, whatever has been sent on since."""

    def __init__(self, shelf: Shelf) -> None:
        self.size_bytes = 0
        self._shelf = shelf
        self._pieces: deque[bytes] = deque()

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.size_bytes += len(piece)
        self._shelf.held_bytes += len(piece)

    def whole(self) -> bytes:
        """A copy of what is held; nothing is let go."""
        return b"".join(self._pieces)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The pieces, once: each is let go as it is taken."""
        while self._pieces:
            yield self._next()

    def drop(self) -> None:
        while self._pieces:
            self._next()

    def _next(self) -> bytes:
        piece = self._pieces.popleft()
        self._shelf.held_bytes -= len(piece)
        return piece


def check_size(request: web.BaseRequest, limit_bytes: int) -> None:
    """What the headers tell already. Raises Refusal."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refusal(415, "encoding", "the body must not be compressed")
    if (request.content_length or 0) > limit_bytes:
        raise _too_large(limit_bytes)


async def read(request: web.BaseRequest, body: Body, shelf: Shelf, limit_bytes: int) -> None:
    """Read the whole body into `body`. Raises Refusal, and ShelfFull."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(CONTINUE)
    try:
        async with asyncio.timeout(BODY_S):
            while piece := await request.content.readany():
                body.add(piece)
                if body.size_bytes > limit_bytes:
                    raise _too_large(limit_bytes)
                if not shelf.has_room(0, largest=limit_bytes):
                    raise ShelfFull
    except TimeoutError:
        raise Refusal(408, "slow_body", f"the body did not arrive within {BODY_S:g} s") from None
    except web.RequestPayloadError:
        raise Refusal(400, "bad_body", "the body cannot be read") from None


def _too_large(limit_bytes: int) -> Refusal:
    return Refusal(413, "too_large", f"the body is larger than max_body = {limit_bytes} bytes")
