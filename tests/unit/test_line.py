"""Seats and the queue: order of arrival, several seats for several answers, nothing lost when one goes."""

from __future__ import annotations

import asyncio

import pytest

from appliance.front import parameters
from appliance.front.line import Line, TurnedAway


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_request_for_several_answers_takes_as_many_seats_and_nobody_passes_it() -> None:
    async def scene() -> None:
        line = Line(seats=lambda: 4, places=lambda: 8)
        order: list[str] = []

        async def guest(name: str, wanted: int) -> None:
            assert line.enter()
            await line.sit(5, wanted=wanted)
            order.append(name)

        tasks = [asyncio.create_task(guest(name, wanted)) for name, wanted in (("a", 2), ("b", 1), ("c", 3), ("d", 1))]
        await settle()
        assert order == ["a", "b"], "c does not fit, and d does not pass it"
        assert (line.running, line.taken, line.queued) == (2, 3, 2)
        line.leave(seated_s=1.0, wanted=2)
        await settle()
        assert order == ["a", "b", "c"]
        assert line.taken == 4
        line.leave(seated_s=1.0, wanted=1)
        await settle()
        assert order == ["a", "b", "c", "d"]
        line.leave(seated_s=1.0, wanted=3)
        line.leave(seated_s=1.0, wanted=1)
        assert (line.inside, line.running, line.taken) == (0, 0, 0)
        await asyncio.gather(*tasks)

    asyncio.run(scene())


def test_one_that_wants_more_than_there_are_now_sits_alone() -> None:
    async def scene() -> None:
        seats = 4
        line = Line(seats=lambda: seats, places=lambda: 8)
        line.enter()
        await line.sit(1)
        line.enter()
        waiting = asyncio.create_task(line.sit(5, wanted=4))
        await settle()
        seats = 2  # the plan stepped down meanwhile
        line.leave(seated_s=1.0)
        await asyncio.wait_for(waiting, 1)
        assert line.taken == 4

    asyncio.run(scene())


@pytest.mark.parametrize("end", ["timeout", "cancel", "turned away"])
def test_one_that_gives_up_holds_nothing_and_the_next_moves_up(end: str) -> None:
    async def scene() -> None:
        line = Line(seats=lambda: 4, places=lambda: 8)
        line.enter()
        await line.sit(1, wanted=3)
        line.enter()
        large = asyncio.create_task(line.sit(0.05 if end == "timeout" else 5, wanted=2))
        line.enter()
        small = asyncio.create_task(line.sit(5))
        await settle()
        assert not small.done()
        if end == "cancel":
            large.cancel()
        elif end == "turned away":
            line.turn_away()
        with pytest.raises((TimeoutError, asyncio.CancelledError, TurnedAway)):
            await large
        line.leave(seated_s=None, wanted=2)
        if end == "turned away":
            with pytest.raises(TurnedAway):
                await small
            line.leave(seated_s=None)
        else:
            await asyncio.wait_for(small, 1)
            line.leave(seated_s=1.0)
        line.leave(seated_s=1.0, wanted=3)
        assert (line.inside, line.running, line.taken) == (0, 0, 0)

    asyncio.run(scene())


@pytest.mark.parametrize(("body", "wanted"), [
    (b'{"prompt": "x"}', 1), (b'{"prompt": "x", "n": 3}', 3), (b'{"prompt": ["a", "b"], "n": 3}', 6), (b'{"prompt": [1, 2, 3]}', 1),
    (b'{"prompt": [[1], [2]]}', 2), (b'{"messages": [], "n": 8}', 8), (b'{"prompt": "say \\"n\\": 4"}', 1), (b'{"n": "4"}', 1), (b'[1]', 1),
    (b'{"n": 2', 1), (b'{"\\u006e": 5}', 5), (b'{"n": 1, "messages": "' + b"x" * 1024**2 + b'"}', 8), (b'{"messages": "' + b"x" * 1024**2 + b'"}', 1),
])
def test_answers_asked_for_at_once(body: bytes, wanted: int) -> None:
    assert parameters.sequences(body, most=8) == wanted
