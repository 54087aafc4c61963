"""The front door: owns the public port and `agent.sock` from the agent's first moment to its last.

A thread of its own with an asyncio loop; it meets the agent's loop at the Board only. Twice a second it reports its
traffic there (its heartbeat), ends the waiting when the gate was shut, and ends requests whose client takes nothing.
`start` binds in the caller's thread, so that a taken port is an error before anything is loaded. Does not: decide when
the gate is open, or know what the worker is.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

from appliance.board import Board, Traffic
from appliance.errors import ConfigError, TransientError
from appliance.front import certificate
from appliance.front.connection import Listener
from appliance.front.desk import Desk
from appliance.front.relay import Relay
from appliance.front.words import Refusal
from appliance.keys import KeyRing, configured_key
from appliance.settings import Settings, is_loopback
from appliance.supervisor.health import listening_socket

HEARTBEAT_S = 0.5
STALLED_S = 60.0
"""A client that takes nothing of its answer for so long is cut off."""
BACKLOG = 1024
HANDSHAKE_S = 10.0
CERTIFICATE_CHECK_S = 3600.0
START_S = 10.0
CALL_S = 5.0
NEXT_START = "counts at the next start of the agent (systemctl restart appliance, or a new `serve`)"


class FrontDoor:
    """See the module. `start`, `reload` and `stop` are called by the agent's loop, from its thread."""

    def __init__(
        self, *, settings: Settings, board: Board, worker_socket: Path, agent_socket: Path, keys: KeyRing
    ) -> None:
        self._settings = settings
        self._board = board
        self._worker_socket = worker_socket
        self._agent_socket = agent_socket
        self._keys = keys
        self._certificates = certificate.Certificates(settings.tls) if settings.tls.cert else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="front-door", daemon=True)
        self._listening = threading.Event()
        self._desk: Desk | None = None
        self._grace_s = 0.0
        self._stop_asked: asyncio.Event | None = None
        self._certificate_warning: str | None = None
        self._certificate_checked = float("-inf")

    def start(self) -> None:
        """Bind both sockets and begin to answer. Raises ConfigError or TransientError, with nothing left open."""
        refusal = exposure_refusal(self._settings, self._keys)
        if refusal:
            raise refusal
        public = listening_socket(self._settings.listen.host, self._settings.listen.port, backlog=BACKLOG)
        try:
            own = _own_socket(self._agent_socket)
        except BaseException:
            public.close()
            raise
        self._sockets = (public, own)
        self._thread.start()
        if not self._listening.wait(START_S):
            raise TransientError("the front door did not open", why="its thread did not start", do="see the log")

    @property
    def address(self) -> str:
        """Where the API is reached, as bound: `scheme://host:port`."""
        listen = self._settings.listen
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        return f"{'https' if self._certificates else 'http'}://{host}:{listen.port}"

    @property
    def max_queued(self) -> int:
        """The limit in force: after a reload that was refused it is not the configuration's."""
        return self._settings.max_queued

    def reload(self, settings: Settings) -> str | None:
        """Take new keys, limits and certificate files; what was not taken, and why.

        A key or certificate that cannot be used changes nothing. The address, and TLS on or off, stay as they are bound
        while all else is taken.
        """
        bound, later = self._settings, []
        if settings.listen != bound.listen:
            settings = replace(settings, listen=bound.listen)
            later.append("listen")
        switched = (settings.tls.cert is None) != (bound.tls.cert is None)
        if switched:
            settings = replace(settings, tls=bound.tls)
            later.append("TLS on or off")
        try:
            extra = configured_key(settings.api_key_file, os.environ)
            if self._certificates is not None and not switched:
                self._certificates.load(settings.tls)
        except ConfigError as error:
            return error.line
        self._keys.extra = extra
        self._settings = settings
        self._certificate_checked = float("-inf")
        if self._desk is not None:
            self._desk.settings = settings  # one assignment: seen by the next request
        return f"{' and '.join(later)} changed: {NEXT_START}" if later else None

    def stop(self, *, grace_s: float) -> None:
        """Answer new requests with 503 while running ones have `grace_s` to finish; then close everything."""
        if not self._thread.is_alive():
            return
        self._grace_s = grace_s
        with contextlib.suppress(RuntimeError):  # it ended by itself in this moment
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._ask_stop)
        self._thread.join(grace_s + CALL_S)
        self._agent_socket.unlink(missing_ok=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

    def _ask_stop(self) -> None:
        if self._stop_asked is not None:
            self._stop_asked.set()

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._stop_asked = asyncio.Event()
        relay = Relay(self._worker_socket)
        desk = self._desk = Desk(settings=self._settings, board=self._board, keys=self._keys, relay=relay)
        listeners = Listener(desk.public), Listener(desk.own)
        public, own = self._sockets
        tls = self._certificates.context if self._certificates else None
        servers = [
            await loop.create_server(listeners[0], sock=public, ssl=tls, backlog=BACKLOG,
                                     ssl_handshake_timeout=HANDSHAKE_S if tls else None),
            await loop.create_unix_server(listeners[1], sock=own, backlog=BACKLOG),
        ]
        self._listening.set()
        try:
            while not self._stop_asked.is_set():
                self._beat(desk)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._stop_asked.wait()
            await self._finish(desk)
        finally:
            for server in servers:
                server.close()
            for listener in listeners:
                await listener.shutdown(CALL_S / 5)
            await relay.close()

    async def _finish(self, desk: Desk) -> None:
        """Requests in work have the grace; what is left then is ended with a word."""
        desk.stopping = True
        clock = asyncio.get_running_loop().time
        end = clock() + self._grace_s
        while desk.flights and clock() < end:
            self._beat(desk)
            await asyncio.sleep(0.05)
        stopped = Refusal(503, "stopping", "the service was stopped before the answer was complete", retry_after_s=5)
        for flight in set(desk.flights):
            flight.end(stopped)
        for _ in range(20):
            if not desk.flights:
                break
            await asyncio.sleep(0.05)
        self._beat(desk)

    def _beat(self, desk: Desk) -> None:
        """Report, and end what must not go on."""
        if desk.stopping or not self._board.gate.open:
            desk.turn_away()
        now = asyncio.get_running_loop().time()
        for flight in set(desk.flights):
            if flight.writing_since is not None and now - flight.writing_since > STALLED_S:
                flight.end(Refusal(408, "client_stalled", "the client took nothing of the answer"))
        if now - self._certificate_checked > CERTIFICATE_CHECK_S:
            self._certificate_checked = now
            self._certificate_warning = certificate.warning(self._settings.tls, now=datetime.datetime.now(datetime.UTC))
        sums = desk.sums
        ages = (now - flight.seated for flight in desk.flights if flight.seated is not None)
        self._board.traffic = Traffic(
            at=time.monotonic(), running=desk.line.running, queued=desk.line.queued,
            accepted_total=desk.accepted_total, refused_total=desk.refused_total, failed_total=desk.failed_total,
            answered_total=desk.answered_total, bytes_total=sums.bytes_total, chunks_total=sums.chunks_total,
            oldest_running_s=max(ages, default=0.0),
            warnings=tuple(filter(None, (self._certificate_warning, self._keys.warning))),
        )


def exposure_refusal(settings: Settings, keys: KeyRing) -> ConfigError | None:
    """Why this address must not be listened on: other machines could use the service without a key."""
    if is_loopback(settings.listen.host) or keys.required:
        return None
    return ConfigError(f"will not listen on {settings.listen.host}",
                       why="it can be reached from other machines and there is no API key",
                       do="make one with `applianctl key new`, or set listen.host to 127.0.0.1")


def _own_socket(path: Path) -> socket.socket:
    """The agent's own socket: user and group. The caller holds the agent's lock, so what lies there is left over."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        made.bind(str(path))
        path.chmod(0o660)  # before it listens: nobody gets in between
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot make the socket {path}", why=error.strerror or str(error),
                          do="check the runtime folder, or set APPLIANCE_HOME") from None
    return made
