"""What the agent tells systemd: READY, STATUS, WATCHDOG, RELOADING, STOPPING, EXTEND_TIMEOUT_USEC.

A facade over `sdnotify`: without NOTIFY_SOCKET, or with a dead one, nothing is said and the service runs all the same.
Rules: the variables are taken out of the agent's own environment, so that no child can inherit them; a send never
blocks; the watchdog is fed at a third of its interval, and only by the loop, which decides whether it is deserved.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import MutableMapping

EXTEND_EVERY_S = 10.0
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Made once, before any child is started. `warning`: why systemd cannot be told, where it asked to be."""

    def __init__(self, env: MutableMapping[str, str]) -> None:
        from sdnotify import SystemdNotifier

        address = env.get("NOTIFY_SOCKET", "")
        self.warning = ""
        self.watchdog_s = _watchdog_s(env)
        self._fed = 0.0
        self._extended = 0.0
        self._progress: tuple[object, ...] = ()
        self._status = ""
        self._systemd = SystemdNotifier() if address else None
        if self._systemd is not None and self._systemd.socket is None:
            self.warning = f"systemd cannot be told anything: NOTIFY_SOCKET {address} does not answer"
            self._systemd = None
        if self._systemd is not None:
            self._systemd.socket.setblocking(False)
        for name in VARIABLES:
            env.pop(name, None)
            os.environ.pop(name, None)

    @property
    def listening(self) -> bool:
        return self._systemd is not None

    @property
    def tick_s(self) -> float:
        """How long the loop may rest between two turns: a quarter of the watchdog's interval, at most half a second."""
        return min(0.5, self.watchdog_s / 4) if self.watchdog_s else 0.5

    def status(self, sentence: str) -> None:
        if sentence != self._status:
            self._status = sentence
            self._send(f"STATUS={sentence}")

    def ready(self) -> None:
        self._send("READY=1")

    def reloading(self) -> None:
        # Without the time systemd 257 and later wait for ever.
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, within_s: float = 0.0) -> None:
        """`within_s`: how long it may take; systemd's own limit holds where that is longer."""
        self._send("STOPPING=1" + (f"\nEXTEND_TIMEOUT_USEC={int(within_s * 1e6)}" if within_s else ""))

    def extend(self, seconds: float) -> None:
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def extend_on_progress(self, progress: tuple[object, ...], seconds: float, now: float) -> None:
        """Ask for more time when `progress` has changed since the last time, at most once in EXTEND_EVERY_S."""
        if progress != self._progress and now - self._extended >= EXTEND_EVERY_S:
            self._progress, self._extended = progress, now
            self.extend(seconds)

    def feed(self, now: float) -> None:
        """Feed the watchdog when a third of its interval has passed. `now`: monotonic seconds."""
        if self.watchdog_s and now - self._fed >= self.watchdog_s / 3 - self.tick_s:
            self._fed = now
            self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._systemd is not None:
            self._systemd.socket.close()

    def _send(self, message: str) -> None:
        if self._systemd is not None:
            self._systemd.notify(message)


def _watchdog_s(env: MutableMapping[str, str]) -> float:
    """The watchdog's interval in seconds; 0 where there is none, or where it is meant for another process."""
    with contextlib.suppress(ValueError):
        if env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            return max(0, int(env.get("WATCHDOG_USEC", "0"))) / 1e6
    return 0.0
