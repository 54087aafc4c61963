"""Repeats of one thing: warm up, then again until the time is used up. Values, not judgements."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_REPEATS = 3


def repeat(once: Callable[[], object], *, budget_s: float, most: int = 200) -> list[float]:
    """Seconds of each call after a first one that does not count; at least LEAST_REPEATS of them. A thing that takes
    longer than the time is done once."""
    began = time.perf_counter()
    once()
    if (first := time.perf_counter() - began) > budget_s:
        return [first]
    found: list[float] = []
    end = time.perf_counter() + budget_s
    while len(found) < LEAST_REPEATS or (time.perf_counter() < end and len(found) < most):
        began = time.perf_counter()
        once()
        found.append(time.perf_counter() - began)
    return found
