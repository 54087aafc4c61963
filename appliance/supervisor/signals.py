"""Signals as commands: the loop takes them in its own time, and none interrupts what it does.

SIGTERM and SIGINT ask to stop. SIGHUP asks a service to reload; to an agent on a terminal it means that the terminal
goes away, so it asks to stop.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from appliance.board import Command

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def as_commands(put: Callable[[Command], None], *, service: bool) -> Iterator[None]:
    """Inside, signals are put as commands. `put` must be safe in a handler (queue.SimpleQueue is)."""

    def note(number: int, _: FrameType | None) -> None:
        put(Command(name="reload" if service and number == signal.SIGHUP else "stop"))

    numbers = (*STOP_SIGNALS, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in numbers:
            # Only the way out is left: another signal must not change the exit code.
            signal.signal(number, signal.SIG_IGN)
