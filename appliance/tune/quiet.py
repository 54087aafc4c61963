"""Is the machine quiet enough to measure, and is the service left alone?

Counts processor time from /proc/stat on the CPUs in question. Rules: a service with work goes first, always; a figure
taken while others used more than DISTURBED of the CPUs is not believed.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import status
from appliance.errors import TransientError

DISTURBED = 0.10
POLL_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Processor seconds since boot: of all processes on the CPUs; of ourselves and our children that have ended; and
    the clock."""

    busy_s: float
    ours_s: float
    at: float


def usage(cpus: tuple[int, ...]) -> Usage:
    """Where the CPUs stand now. Time stolen by a hypervisor counts as busy: somebody else has it."""
    hertz = os.sysconf("SC_CLK_TCK")
    busy = 0.0
    for line in Path("/proc/stat").read_text().splitlines():
        word, *fields = line.split()
        if word.startswith("cpu") and word[3:].isdigit() and int(word[3:]) in cpus:
            ticks = [int(field) for field in fields[:8]]
            busy += (sum(ticks) - ticks[3] - ticks[4]) / hertz
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Usage(busy_s=busy, ours_s=sum(one.ru_utime + one.ru_stime for one in found), at=time.monotonic())


def others(before: Usage, after: Usage, cpus: tuple[int, ...], *, living_s: float = 0.0) -> float:
    """The share of the CPUs that others used in between, 0 to 1. `living_s`: what children that still live used."""
    spent = (after.busy_s - before.busy_s) - (after.ours_s - before.ours_s) - living_s
    span = (after.at - before.at) * max(1, len(cpus))
    return min(1.0, max(0.0, spent / span)) if span > 0 else 0.0


def wait(cpus: tuple[int, ...], *, limit_s: float) -> float:
    """Wait until others use little, at most so long; the share that they used last."""
    end = time.monotonic() + limit_s
    while True:
        before = usage(cpus)
        time.sleep(POLL_S)
        share = others(before, usage(cpus), cpus)
        if share <= DISTURBED or time.monotonic() >= end:
            return share


def service_busy(runtime: Path) -> str | None:
    """Why the running service must not be disturbed now; None when it is idle, or none runs."""
    found = status.current(runtime)
    if found is None:
        return None
    waiting = int(found.get("running") or 0) + int(found.get("queued") or 0)
    if waiting:
        return f"{waiting} requests are being answered"
    if found.get("state") not in ("ready", "failed", "stopped", "waiting"):
        return f"the service is {found.get('state')}"
    return None


class ServiceNeedsTheCores(TransientError):
    """A request came while a trial ran; the trial was given up."""


class TimeIsUp(TransientError):
    """The run's time ended during a trial; the trial was given up."""

    def __init__(self) -> None:
        super().__init__("the trial was given up", why="the time is up")


def yielding(runtime: Path, *, until: float = math.inf) -> Callable[[Mapping[str, Any]], None]:
    """A receiver of events that gives the trial up when the service has got work, and `until` (monotonic) is past."""
    looked = time.monotonic()

    def look(_: Mapping[str, Any]) -> None:
        nonlocal looked
        if time.monotonic() >= until:
            raise TimeIsUp
        if time.monotonic() - looked < POLL_S:
            return
        looked = time.monotonic()
        if reason := service_busy(runtime):
            raise ServiceNeedsTheCores("the trial was given up", why=reason)

    return look
