"""PURE: what a gateway knows of its nodes: weights from measured speed, limits, as rows of its configuration.

Does not: ask a node. Rules: what is unknown now stays as it was written before, so that a node that is off when the
role runs changes nothing; a weight moves only when the speed did, for a speed is measured anew at each start of a node.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

FASTEST = 100
"""The weight of the fastest node; HAProxy takes 1 to 256."""
MAX_RUNNING, MAX_QUEUED = 8, 16
"""Of a node that was never asked: few enough for any."""
WRITTEN = re.compile(r"^\s*server (\S+) \S+ weight (\d+) maxconn (\d+)", re.MULTILINE)


def written(text: str) -> dict[str, tuple[int, int]]:
    """Weight and limit of each node in a configuration that this role wrote."""
    return {name: (int(weight), int(limit)) for name, weight, limit in WRITTEN.findall(text)}


def weights(speeds: Mapping[str, float | None], before: Mapping[str, int], *, change_pct: float) -> dict[str, int]:
    """In proportion to the speed, the fastest FASTEST. An unknown node keeps what it had, else it is a middle one."""
    known = [speed for speed in speeds.values() if speed]
    middle = statistics.median(known) if known else 1.0
    fastest = max(known, default=1.0)
    found = {}
    for name, speed in speeds.items():
        had = before.get(name, 0)
        now = max(1, round(FASTEST * (speed or middle) / fastest))
        kept = had and (not speed or abs(now - had) <= had * change_pct / 100)
        found[name] = had if kept else now
    return found


def rows(nodes: Sequence[Mapping[str, Any]], text: str = "", *, change_pct: float = 20,
         port: int = 8000) -> list[dict[str, Any]]:
    """The nodes as they are written. `nodes`: name, address, and what is known of port, weight, decode_tokens_per_s,
    max_running, max_queued; `text`: the configuration before."""
    names = [re.sub(r"[^A-Za-z0-9_.-]", "_", str(node["name"])) for node in nodes]
    had = written(text)
    speeds = {name: _number(node.get("decode_tokens_per_s")) for name, node in zip(names, nodes, strict=True)}
    share = weights(speeds, {name: weight for name, (weight, _) in had.items()}, change_pct=change_pct)
    made = []
    for name, node in zip(names, nodes, strict=True):
        running, queued = node.get("max_running"), _whole(node.get("max_queued"), MAX_QUEUED)
        # One place of its queue stays free: a node whose queue is full is not ready.
        most = _whole(running, MAX_RUNNING) + max(0, queued - 1)
        address = str(node["address"])
        made.append({
            "name": name, "address": f"[{address}]" if ":" in address else address,
            "port": _whole(node.get("port"), port), "weight": _whole(node.get("weight"), share[name]),
            "max_queued": queued, "maxconn": had[name][1] if not running and name in had else most})
    return made


def _number(value: Any) -> float | None:
    """A speed; None for what is none."""
    try:
        number = float(value or 0)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 < number < math.inf else None


def _whole(value: Any, default: int) -> int:
    """A count, where one is known; 0 of `max_queued` is one."""
    return default if value is None or value == "" else int(value)


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"gateway_rows": rows}
