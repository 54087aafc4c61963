"""One request to the worker's unix socket, and its answer back to the client as it comes.

Nothing is collected: what one read brings is written at once. Leaving `answer` in any way but the end closes the
connection to the worker, and vLLM then aborts that request. Rules:

* only the headers of SENT go to the worker, only those of PASSED come back;
* an answer begins with its first piece, a stream's too: a worker that dies or fails before is a Refusal, which can be
  asked of another node; one that dies in the middle of an event stream ends the client's stream with an error event, in
  the middle of anything else with a closed connection;
* idle connections are dropped well before the worker would drop them (5 s), so none is found closed.

Does not: queue, judge, or know keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from appliance.front.body import Body
from appliance.front.words import SERVER, Refusal

IDLE_S = 2.0
CONNECT_S = 5.0
SENT = ("Content-Type", "Accept", "X-Request-Id")
PASSED = ("Content-Type", "X-Request-Id", "Retry-After")
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""A gateway in between must not collect a stream either."""
WHOLE_BYTES = 4 * 1024**2
WORKER = "http://worker"
ERROR = b'data: {"error"'
"""How vLLM's last event begins when a stream fails in the middle; a text that is generated has its quotes escaped."""
LOST_RETRY_S = 2
LAST_WORD_S = 2.0


@dataclass(kw_only=True, eq=False)
class Flight:
    """A request in work, as the heartbeat sees it. Clocks: the event loop's. `entered`: it has a place in the line;
    `seats`: how many it takes; `asked`: the worker was; `writing_since`: the client has taken nothing since then;
    `failed`: the worker's stream said an error; `ended`: why the door ends it."""

    task: asyncio.Task[object]
    began: float
    seated: float | None = None
    entered: bool = False
    seats: int = 1
    asked: bool = False
    writing_since: float | None = None
    failed: bool = False
    ended: Refusal | None = None

    def end(self, why: Refusal) -> None:
        if self.ended is None:
            self.ended = why
            self.task.cancel()

    def resume(self) -> Refusal | None:
        """Called when the task was cancelled: the reason if it was the door, and then the task may go on."""
        if self.ended is not None:
            self.task.uncancel()
        return self.ended


@dataclass(kw_only=True)
class Sums:
    """Over all answers so far. `chunks_total`: data events of streams, one per token as a rule."""

    bytes_total: int = 0
    chunks_total: int = 0


class Relay:
    """The connections to one worker socket, whichever worker listens there now. Made inside the event loop."""

    def __init__(self, worker_socket: Path) -> None:
        self.sums = Sums()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(worker_socket), limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def answer(self, request: web.BaseRequest, path: str, body: Body, flight: Flight) -> web.StreamResponse:
        """Ask the worker and pass its answer on; `body` is used up. Raises Refusal when nothing was passed on yet, and
        ConnectionError when the client is gone."""
        headers = {name: request.headers[name] for name in SENT if name in request.headers}
        headers["Content-Length"] = str(body.size_bytes)
        try:
            reply = await self._session.post(WORKER + path, data=body.pieces(), headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            raise lost(error) from None
        try:
            return await self._pass_on(request, reply, flight)
        finally:
            reply.close()  # the connection is kept only if the answer was read to its end

    async def whole(self, path: str, *, timeout_s: float) -> bytes | None:
        """A small answer of the worker, read whole; None when there is none in time."""
        data = bytearray()
        try:
            async with asyncio.timeout(timeout_s), self._session.get(WORKER + path, allow_redirects=False) as reply:
                async for piece in reply.content.iter_any():
                    data += piece
                    if len(data) > WHOLE_BYTES:
                        return None
                return bytes(data) if reply.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _pass_on(
        self, request: web.BaseRequest, reply: aiohttp.ClientResponse, flight: Flight
    ) -> web.StreamResponse:
        streamed = reply.content_type == "text/event-stream"
        response = web.StreamResponse(status=reply.status, headers=_passed(reply.headers))
        if streamed:
            response.headers.update(STREAM_HEADERS)
        elif reply.content_length is not None:
            response.content_length = reply.content_length
        if reply.status == 503:  # vLLM's own, from a full or ending worker, does not say when to come back
            response.headers.setdefault("Retry-After", str(LOST_RETRY_S))
        clock = asyncio.get_running_loop().time
        sums = self.sums
        end = b""  # of the piece before: an event may be cut anywhere
        try:
            while True:
                try:
                    piece = await reply.content.readany()
                except (aiohttp.ClientError, OSError) as error:
                    cut = lost(error)
                    break
                if not response.prepared:
                    if streamed and piece.startswith(ERROR):
                        cut = failed(piece)
                        break
                    await response.prepare(request)
                flight.writing_since = clock()
                if not piece:
                    await response.write_eof()  # here, where a client that takes nothing is noticed
                    return response
                sums.bytes_total += len(piece)
                if streamed:
                    sums.chunks_total += piece.count(b"data: {")
                    end += piece
                    flight.failed = flight.failed or ERROR in end
                    end = end[1 - len(ERROR):]
                await response.write(piece)
                flight.writing_since = None
        except asyncio.CancelledError:
            ended = flight.resume()
            if ended is None:
                raise
            cut = ended
        if not response.prepared:
            raise cut
        flight.ended = cut
        if streamed and flight.writing_since is None:
            response.force_close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await response.write(cut.event())
                    await response.write_eof()
        elif request.transport is not None:
            request.transport.abort()
        return response


def lost(error: BaseException) -> Refusal:
    """The worker is not there, or went away in the middle. The agent starts another one."""
    if isinstance(error, aiohttp.ClientConnectorError | FileNotFoundError):
        return Refusal(503, "worker_restarting", "the worker is being restarted", retry_after_s=LOST_RETRY_S)
    return Refusal(502, "worker_lost", "the worker ended before its answer was complete; it is being restarted")


def failed(event: bytes) -> Refusal:
    """A stream whose first event is an error has not begun: its client gets a status that says so."""
    try:
        error = json.loads(event.removeprefix(b"data: ").partition(b"\n")[0])["error"]
        status, message = int(error.get("code") or 500), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        status, message = 500, "the worker failed"
    return Refusal(status if 400 <= status < 600 else 500, "worker_failed", message)


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {"Server": SERVER} | {name: headers[name] for name in PASSED if name in headers}
