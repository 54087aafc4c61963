"""Seats and the queue before them: how many requests are computed at once, how many wait, in which order.

A request `enter`s (or is turned away at once: full), waits for its seats in order of arrival (one for each answer it
asks for at once), and `leave`s. Bounds are asked for at each step, because a step down of the plan can lower them. One
event loop, no locks. Does not: read requests, or know what a seat is used for.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

FIRST_GUESS_S = 5.0
LONGEST_RETRY_S = 60


class TurnedAway(Exception):
    """The queue was ended while this request waited; the gate has the reason."""


class Line:
    """`seats`, `places`: the bounds now. `inside`: requests that entered; `running`: those with seats; `taken`: the
    seats they have."""

    def __init__(self, *, seats: Callable[[], int], places: Callable[[], int]) -> None:
        self._seats = seats
        self._places = places
        self.inside = 0
        self.running = 0
        self.taken = 0
        self._turns: deque[tuple[asyncio.Future[None], int]] = deque()
        self._service_s = FIRST_GUESS_S

    @property
    def queued(self) -> int:
        return self.inside - self.running

    def full(self) -> bool:
        return self.inside >= self._seats() + self._places()

    def enter(self) -> bool:
        """Come in, if there is room."""
        if self.full():
            return False
        self.inside += 1
        return True

    async def sit(self, wait_s: float, *, wanted: int = 1) -> None:
        """Wait for `wanted` seats at once. Raises TimeoutError after `wait_s`, TurnedAway when the queue is ended."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append((turn, wanted))
        self._call_next()
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException:
            if (turn, wanted) in self._turns:
                self._turns.remove((turn, wanted))
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(wanted)  # given in the same moment: on to the next one
            self._call_next()
            raise

    def leave(self, *, seated_s: float | None, wanted: int = 1) -> None:
        """Go; `seated_s`: how long the seats were held, None for one who never had them."""
        self.inside -= 1
        if seated_s is not None:
            self._give_back(wanted)
            self._service_s += 0.2 * (seated_s - self._service_s)
        self._call_next()

    def turn_away(self) -> None:
        """End the wait of everybody in the queue."""
        while self._turns:
            turn, _ = self._turns.popleft()
            if not turn.done():
                turn.set_exception(TurnedAway())

    def retry_after_s(self) -> int:
        """When a place is likely free: measured time per seat, for those before you."""
        expected = self._service_s * (self.queued + 1) / max(1, self._seats())
        return max(1, min(LONGEST_RETRY_S, math.ceil(expected)))

    def _give_back(self, wanted: int) -> None:
        self.running -= 1
        self.taken -= wanted

    def _call_next(self) -> None:
        """Seat the first in the queue while it fits; one that wants more than there are now sits alone."""
        while self._turns:
            turn, wanted = self._turns[0]
            if turn.done():
                self._turns.popleft()
            elif self.taken + wanted <= self._seats() or not self.taken:
                self._turns.popleft()
                self.running += 1
                self.taken += wanted
                turn.set_result(None)
            else:
                return
