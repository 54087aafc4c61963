"""One request from its arrival to its end: guard, limits, queue, then the worker's answer or one of the door's own.

Order: key or stranger (401, 403), path (404, 405), gate (503), size (413, 415), room (429); only then is the body read,
a place in the queue taken, a seat waited for and the worker asked. Rules:

* a refusal costs no waiting, and as a rule no reading of a body;
* a place is for a request that is there: one whose body never comes holds nothing but one of SENDERS;
* an accepted request ends with an answer or an error, at the latest `request_s` after it arrived, and at once when
  its client goes;
* a request that is refused because of the state says the state's word and when to come back.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from aiohttp import web

from appliance import metrics
from appliance.board import COMMANDS, Board, Command
from appliance.front import guard, parameters, routes, words
from appliance.front.body import Body, Shelf, ShelfFull, check_size, read
from appliance.front.connection import Connection
from appliance.front.line import Line, TurnedAway
from appliance.front.relay import Flight, Relay, Sums
from appliance.front.routes import Kind, Route
from appliance.front.words import SERVER, Refusal
from appliance.keys import KeyRing
from appliance.settings import Settings, is_loopback

WAIT_S = 300.0
"""How long a request may wait for a seat."""
RUNNING = 8
SENDERS = 128
"""Requests whose bodies are still on their way."""
COMMANDS_WAITING = 32
"""Seats until the plan has said how many."""
LIGHT_SEATS, LIGHT_PLACES, LIGHT_WAIT_S = 4, 64, 30.0
MODELS_S, METRICS_S = 10.0, 1.0
JSON = "application/json"
log = logging.getLogger("appliance.front")


class Desk:
    """Answers requests of both sides. One event loop; `settings` is replaced whole at a reload."""

    def __init__(self, *, settings: Settings, board: Board, keys: KeyRing, relay: Relay) -> None:
        self.settings = settings
        self.stopping = False
        self.flights: set[Flight] = set()
        self.sending = 0
        self.answered_total = self.accepted_total = self.refused_total = self.failed_total = 0
        self._board = board
        self._keys = keys
        self._relay = relay
        self._shelf = Shelf()
        self.line = Line(seats=self._seats, places=lambda: self.settings.max_queued)
        self._light = Line(seats=lambda: LIGHT_SEATS, places=lambda: LIGHT_PLACES)

    @property
    def sums(self) -> Sums:
        return self._relay.sums

    async def public(self, request: web.BaseRequest) -> web.StreamResponse:
        """A request on the public port."""
        return await self._answer(request, self._guarded)

    async def own(self, request: web.BaseRequest) -> web.StreamResponse:
        """A request on the agent's own socket: its mode and group have let it in."""
        return await self._answer(request, lambda request: self._routed(request, own_socket=True))

    def turn_away(self) -> None:
        """The gate is shut: nobody waits any longer."""
        self.line.turn_away()
        self._light.turn_away()

    async def _answer(
        self, request: web.BaseRequest, find: Callable[[web.BaseRequest], Route]
    ) -> web.StreamResponse:
        connection = request.protocol
        task = asyncio.current_task()
        assert isinstance(connection, Connection)
        assert task is not None
        connection.begin(task)
        try:
            response = await self._by_kind(request, find(request))
        except Refusal as refusal:
            response = _refused(refusal)
        except ConnectionError:
            raise  # the client is gone; aiohttp closes up
        except Exception:
            log.exception("a defect while answering %s", request.method)
            response = _refused(Refusal(500, "defect", "a defect of the service; its log has the details"))
        finally:
            connection.end()
        response.headers.setdefault("Server", SERVER)
        return response

    def _guarded(self, request: web.BaseRequest) -> Route:
        """The route of a public request. Raises Refusal."""
        if request.path in routes.OPEN:
            return self._routed(request, own_socket=False)
        keyed = self._keys.required or not is_loopback(self.settings.listen.host)
        if keyed:
            refusal = guard.key_refusal(request.headers.get("Authorization"), self._keys.accepts)
            if refusal:
                raise Refusal(401, "invalid_api_key", refusal, headers={"WWW-Authenticate": "Bearer"})
        else:
            refusal = guard.stranger_refusal(request.headers.get("Host"), request.headers.get("Origin"),
                                             listen_host=self.settings.listen.host)
            if refusal:
                raise Refusal(403, "stranger", refusal)
        route = self._routed(request, own_socket=False)
        if not keyed and route.kind in (Kind.STATUS, Kind.METRICS):
            raise Refusal(403, "key_needed", f"{route.path} is answered here with an API key only; without one, ask the"
                          " agent's own socket (`applianctl status`)")
        return route

    def _routed(self, request: web.BaseRequest, *, own_socket: bool) -> Route:
        found = routes.find(request.method, request.path, own_socket=own_socket)
        if isinstance(found, Route):
            return found
        if not found:
            raise Refusal(404, "unknown_url", "there is no such path here; docs/api.md lists them")
        raise Refusal(405, "method_not_allowed", f"this path takes {' or '.join(found)}",
                      headers={"Allow": ", ".join(found)})

    async def _by_kind(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        board = self._board
        match route.kind:
            case Kind.GENERATE:
                return await self._work(request, route, self.line, WAIT_S)
            case Kind.LIGHT:
                return await self._work(request, route, self._light, LIGHT_WAIT_S)
            case Kind.MODELS:
                return await self._models(route)
            case Kind.LIVE:
                return _word(*words.live_word(board.turned_age_s()))
            case Kind.READY:
                code, word = words.ready_word(
                    board.status, gate_open=board.gate.open and not self.stopping, reason=self._closed_reason(),
                    full=self.line.full(), turned_age_s=board.turned_age_s())
                return _word(code, word, None if code == 200 else self._retry_after_s(word))
            case Kind.STATUS:
                return web.Response(text=json.dumps(dict(board.status), default=str) + "\n", content_type=JSON)
            case Kind.METRICS:
                ours = metrics.render(board.status, board.traffic, live=words.live_word(board.turned_age_s())[0] == 200)
                worker = await self._relay.whole("/metrics", timeout_s=METRICS_S) if board.gate.open else None
                return web.Response(body=ours.encode() + (worker or b""),
                                    headers={"Content-Type": metrics.CONTENT_TYPE})
            case Kind.CONTROL:
                return self._control(route.name)

    async def _work(self, request: web.BaseRequest, route: Route, line: Line, wait_s: float) -> web.StreamResponse:
        """A request for the worker: room, body, seat, answer."""
        generates = route.kind is Kind.GENERATE
        try:
            self._admit(request, line)
        except Refusal:
            self.refused_total += generates
            raise
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        flight = Flight(task=task, began=loop.time())
        self.flights.add(flight)
        late = Refusal(504, "timeout", f"the request took longer than request_s = {self.settings.request_s:g} s")
        timer = loop.call_later(self.settings.request_s, flight.end, late)
        try:
            response = await self._seated(request, route, line, wait_s, flight)
        except Refusal as refusal:
            # A request that never got to the worker was turned away, whatever its status.
            self.refused_total += generates and not flight.asked
            self.failed_total += generates and flight.asked and refusal.status >= 500
            raise
        finally:
            timer.cancel()
            self.flights.discard(flight)
            if flight.entered:
                seated_s = None if flight.seated is None else loop.time() - flight.seated
                line.leave(seated_s=seated_s, wanted=flight.seats)
        if flight.ended is not None or flight.failed or response.status >= 500:
            self.failed_total += generates and (flight.ended is None or flight.ended.status >= 500)
        elif generates and response.status == 200:
            self.answered_total += 1
        return response

    async def _seated(
        self, request: web.BaseRequest, route: Route, line: Line, wait_s: float, flight: Flight
    ) -> web.StreamResponse:
        body = Body(self._shelf)
        try:
            self.sending += 1
            try:
                await read(request, body, self._shelf, self.settings.max_body)
            finally:
                self.sending -= 1
            if route.kind is Kind.GENERATE:
                flight.seats = self._checked(route, body.whole())
            if not line.enter():  # a place in the queue is for a request that is there, not for one that may come
                raise self._full(line)
            flight.entered = True
            self.accepted_total += route.kind is Kind.GENERATE
            await line.sit(wait_s, wanted=flight.seats)
            flight.seated = asyncio.get_running_loop().time()
            self._check_gate()
            flight.asked = True
            return await self._relay.answer(request, route.path, body, flight)
        except ShelfFull:
            raise self._busy(503, "many large requests are waiting") from None
        except TurnedAway:
            self._check_gate()
            raise self._busy(503, "the queue was ended") from None
        except TimeoutError:
            raise self._busy(503, f"no seat was free within {wait_s:g} s") from None
        except asyncio.CancelledError:
            ended = flight.resume()
            if ended is None:
                raise
            raise ended from None
        finally:
            body.drop()

    def _admit(self, request: web.BaseRequest, line: Line) -> None:
        """The checks before anything is read. Raises Refusal."""
        self._check_gate()
        check_size(request, self.settings.max_body)
        if not self._shelf.has_room(request.content_length or 0, largest=self.settings.max_body):
            raise self._busy(503, "many large requests are waiting")
        if line.full():
            raise self._full(line)
        if self.sending >= SENDERS:
            raise self._busy(429, f"{self.sending} requests are still being sent")

    def _full(self, line: Line) -> Refusal:
        return self._busy(429, f"{line.running} requests are being answered and {line.queued} are waiting")

    def _checked(self, route: Route, data: bytes) -> int:
        """The seats that this request takes. Raises Refusal for what it may not ask."""
        most = self._seats()
        if why := parameters.chat_refusal(route.path, self._board.status):
            raise Refusal(400, "no_chat_template", why)
        if why := parameters.tools_refusal(data, route.path, self._board.status):
            raise Refusal(400, "no_tool_parser", why)
        wanted = parameters.sequences(data, most=most)
        refusal = parameters.sequences_refusal(wanted, most=most)
        if refusal is None and not self.settings.allow_prompt_logprobs:
            refusal = parameters.refusal(data, path=route.path)
        if refusal:
            raise Refusal(400, "not_allowed", refusal)
        return wanted

    def _check_gate(self) -> None:
        gate = self._board.gate
        if self.stopping or not gate.open:
            reason = self._closed_reason()
            raise words.closed(reason, str(self._board.status.get("sentence") or ""), self._retry_after_s(reason))

    async def _models(self, route: Route) -> web.StreamResponse:
        """The worker's list of models, or one of them (which vLLM has no path for)."""
        self._check_gate()
        data = await self._relay.whole("/v1/models", timeout_s=MODELS_S)
        if data is None:
            raise Refusal(503, "worker_busy", "the worker did not list its models in time", retry_after_s=2)
        if not route.name:
            return web.Response(body=data, content_type=JSON)
        for model in json.loads(data)["data"]:
            if model["id"] == route.name:
                return web.Response(text=json.dumps(model), content_type=JSON)
        raise Refusal(404, "model_not_found", "the model in this path is not served here; see /v1/models")

    def _control(self, name: str) -> web.StreamResponse:
        if name not in COMMANDS:
            raise Refusal(404, "unknown_command", f"commands are {', '.join(COMMANDS)}")
        if self._board.commands.qsize() >= COMMANDS_WAITING:
            raise Refusal(503, "overloaded", "too many commands wait already", retry_after_s=1)
        self._board.commands.put(Command(name=name))
        return web.Response(status=202, text=json.dumps({"accepted": name}) + "\n", content_type=JSON)

    def _seats(self) -> int:
        return int(self._board.status.get("max_running") or self.settings.max_running or RUNNING)

    def _closed_reason(self) -> str:
        return "stopping" if self.stopping else self._board.gate.reason

    def _retry_after_s(self, word: str) -> int:
        return self.line.retry_after_s() if word == "overloaded" else max(1, self._board.gate.retry_after_s)

    def _busy(self, status: int, why: str) -> Refusal:
        return Refusal(status, "overloaded", f"the service is busy: {why}", retry_after_s=self.line.retry_after_s())


def _refused(refusal: Refusal) -> web.Response:
    return web.Response(status=refusal.status, body=refusal.body(), headers=refusal.all_headers())


def _word(status: int, word: str, retry_after_s: int | None = None) -> web.Response:
    again = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return web.Response(status=status, text=word + "\n", headers={"Cache-Control": "no-store", **again})
