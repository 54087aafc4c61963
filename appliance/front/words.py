"""PURE: what the door itself says: errors in OpenAI's shape, and the words of /livez and /readyz.

Each error has a status, a code (a word for programs) and a sentence; where a later try can succeed, `Retry-After`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SERVER = "appliance"
"""In each answer; without it aiohttp tells strangers its version and Python's."""
LIVE_S = 10.0
"""The loop turns at least twice a second; this long without a turn it counts as stuck."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An answer that is an error. Raised by whoever finds the reason; the desk sends it."""

    def __init__(self, status: int, code: str, message: str, *, retry_after_s: int | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    def body(self) -> bytes:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return json.dumps({"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}).encode()

    def all_headers(self) -> dict[str, str]:
        again = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return {"Content-Type": "application/json", **again, **self.headers}

    def event(self) -> bytes:
        """As the last event of a stream that had begun; the empty line ends an event that was cut."""
        return b"\n\ndata: " + self.body() + b"\n\n"


def closed(reason: str, sentence: str, retry_after_s: int) -> Refusal:
    """The gate is shut: `reason` is the state's word, `sentence` the status."""
    told = f"the service is not ready ({reason})" + (f": {sentence}" if sentence else "")
    return Refusal(503, reason.replace(" ", "_"), told, retry_after_s=max(1, retry_after_s))


def live_word(turned_age_s: float) -> tuple[int, str]:
    return (200, "live") if turned_age_s < LIVE_S else (503, "stuck")


def ready_word(
    status: Mapping[str, Any], *, gate_open: bool, reason: str, full: bool, turned_age_s: float
) -> tuple[int, str]:
    """200 only when the status says ready, the gate is open and one more request would be taken."""
    if turned_age_s >= LIVE_S:
        return 503, "stuck"
    if not gate_open:
        return 503, reason
    if not status.get("ready"):
        return 503, str(status.get("state") or "starting")
    return (503, "overloaded") if full else (200, "ready")
