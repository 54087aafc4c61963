"""A client's connection: bounded in number, in the time until its first request, and noticed when it goes.

aiohttp parses; this adds what its server leaves open: a connection that sends nothing, or its headers byte by byte, is
closed after HEADERS_S. When too many are open, the one that has been waiting longest without a request goes, so that
holding connections open shuts nobody out; a new one is refused only when all others are being answered. The client's
going cancels the work that is done for it. Later requests on a kept connection fall under aiohttp's own keep-alive
timeout.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from aiohttp import web

from appliance.front.words import SERVER, Refusal

MAX_CONNECTIONS = 512
HEADERS_S = 15.0
KEEP_ALIVE_S = 75.0
LINGER_S = 5.0
"""How long the rest of a body that nobody reads is taken and dropped, so that the client sees the answer."""
UNANSWERED_MS = 60_000
"""A peer whose kernel acknowledges nothing for this long has gone, whatever it says."""
MAX_HEADER_BYTES = 16 * 1024


class Connection(web.RequestHandler):
    """One client. `work`: the task that answers it now."""

    def __init__(self, listener: Listener, **options: Any) -> None:
        super().__init__(listener, **options)
        self._listener = listener
        self._refused = False
        self._late: asyncio.TimerHandle | None = None
        self._work: asyncio.Task[Any] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self._listener.connections) >= MAX_CONNECTIONS and not self._listener.drop_idle():
            self._refused = True
            assert isinstance(transport, asyncio.Transport)
            transport.write(self._listener.too_many)
            transport.close()
            return
        super().connection_made(transport)
        self._listener.idle[self] = None
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family != socket.AF_UNIX:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
        self._late = asyncio.get_running_loop().call_later(HEADERS_S, self.force_close)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._refused:
            return
        self._arrived()
        self._listener.idle.pop(self, None)
        super().connection_lost(exc)
        if self._work is not None:
            self._work.cancel()

    def handle_error(self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None,
                     message: str | None = None) -> web.StreamResponse:
        """What cannot be parsed is answered in our own words: no versions, no echo of what was sent."""
        refusal = (Refusal(400, "bad_request", "this is not a request that can be read") if status < 500 else
                   Refusal(500, "defect", "a defect of the service; its log has the details"))
        response = web.Response(status=refusal.status, body=refusal.body(), headers=refusal.all_headers())
        response.headers["Server"] = SERVER
        response.force_close()
        return response

    def begin(self, work: asyncio.Task[Any] | None) -> None:
        """A whole request has arrived; `work` is cancelled when the client goes."""
        self._arrived()
        self._listener.idle.pop(self, None)
        self._work = work

    def end(self) -> None:
        self._work = None
        if self.transport is not None:
            self._listener.idle[self] = None

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Listener(web.Server):
    """Makes the connections of one address and knows them. `idle`: those without a request, longest waiting first."""

    def __init__(self, handler: Any) -> None:
        refusal = Refusal(503, "too_many_connections", f"{MAX_CONNECTIONS} connections are open", retry_after_s=5)
        body = refusal.body()
        head = "".join(f"{name}: {value}\r\n" for name, value in refusal.all_headers().items())
        self.too_many = (f"HTTP/1.1 503 Service Unavailable\r\n{head}Connection: close\r\n"
                         f"Content-Length: {len(body)}\r\n\r\n").encode() + body
        quiet = logging.getLogger("appliance.front.http")
        quiet.disabled = True  # strangers' bad requests are no news; defects are logged by the desk
        self._options = {
            "logger": quiet, "access_log": None, "keepalive_timeout": KEEP_ALIVE_S, "lingering_time": LINGER_S,
            "auto_decompress": False, "max_line_size": MAX_HEADER_BYTES, "max_field_size": MAX_HEADER_BYTES,
        }
        super().__init__(handler)
        self.idle: dict[Connection, None] = {}

    def drop_idle(self) -> bool:
        """Close the connection that has waited longest; False when none waits."""
        waiting = next(iter(self.idle), None)
        if waiting is None:
            return False
        del self.idle[waiting]
        waiting.force_close()
        return True

    def __call__(self) -> Connection:
        return Connection(self, loop=asyncio.get_running_loop(), **self._options)
