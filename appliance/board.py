"""The meeting point of the agent's two threads: the loop publishes, the front door reads and reports traffic.

Values are replaced whole and never changed in place, so a reader needs no lock. Clocks are monotonic seconds except
where a name ends in `_at` and says wall clock. Does not: decide, print or touch a file.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Whether requests are let in, and else the word for it (`loading`, `draining`, ...) and when to come back."""

    open: bool = False
    reason: str = "starting"
    retry_after_s: int = 5


def gate(state: str, *, wait_s: float) -> Gate:
    """Open while the worker answers or works; else closed for a while that a client can wait. `wait_s`: until the next
    start, where that is known."""
    if state in ("ready", "busy"):
        return Gate(open=True, reason=state, retry_after_s=1)
    least_s = 30.0 if state in ("draining", "stopping") else 5.0
    return Gate(open=False, reason=state, retry_after_s=int(min(max(least_s, wait_s), 300.0)))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the front door did and does. `at`: monotonic, when it said so (its heartbeat); `failed_total`: let in
    and ended in an error, in the middle of a stream too; `oldest_running_s`: age of the oldest request in work."""

    at: float = 0.0
    running: int = 0
    queued: int = 0
    accepted_total: int = 0
    refused_total: int = 0
    failed_total: int = 0
    answered_total: int = 0
    bytes_total: int = 0
    chunks_total: int = 0
    oldest_running_s: float = 0.0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Command:
    """What an operator asks of the running agent: reload, drain, resume, restart, stop, reset or rollback."""

    name: str


COMMANDS = ("reload", "drain", "resume", "restart", "stop", "reset", "rollback")


class Board:
    """Made once by the agent. Only the loop calls `publish`, only the front door sets `traffic`."""

    def __init__(self) -> None:
        self.status: Mapping[str, Any] = {}
        self.gate = Gate()
        self.traffic = Traffic()
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._turned_at = time.monotonic()

    def publish(self, status: Mapping[str, Any]) -> None:
        self.status = status
        self._turned_at = time.monotonic()

    def turned_age_s(self) -> float:
        """Seconds since the loop turned last: what `/livez` is about."""
        return time.monotonic() - self._turned_at
