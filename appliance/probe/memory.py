"""Memory of the host and the ceiling that holds this process.

The ceiling is the lowest of MemTotal and every memory.max, memory.high and limit_in_bytes from the own control group
to the root. `used_bytes` is what is already held under that one ceiling, this process included, without reclaimable
page cache: the group's usage minus its file cache, or MemTotal - MemAvailable when the host's memory is the ceiling.
A missing /proc/meminfo leaves the host's sizes unknown; cgroup limits still count.
"""

from __future__ import annotations

import posixpath

from appliance.facts import MemoryFacts
from appliance.probe.cgroup import read_held_bytes, read_memory_limits
from appliance.probe.tree import Tree

HOST_MEMORY = "/proc/meminfo MemTotal"


def parse_meminfo(text: str | None) -> dict[str, int]:
    """`Name: value kB` lines -> bytes, also with the `Node 0` prefix of a NUMA node's meminfo."""
    sizes = {}
    for line in (text or "").splitlines():
        left, _, right = line.partition(":")
        fields = right.split()
        if left.strip() and len(fields) == 2 and fields[0].isdecimal() and len(fields[0]) < 20 and fields[1] == "kB":
            sizes[left.split()[-1]] = int(fields[0]) * 1024
    return sizes


def _held(tree: Tree, source: str, total: int | None, available: int | None) -> int | None:
    if source == HOST_MEMORY:
        return total - available if total is not None and available is not None else None
    return read_held_bytes(tree, posixpath.dirname(source))


def read_memory(tree: Tree) -> MemoryFacts:
    sizes = parse_meminfo(tree.read("/proc/meminfo"))
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    limits = read_memory_limits(tree)
    bounds = [(limit.bytes, limit.source) for limit in limits]
    if total is not None:
        bounds.append((total, HOST_MEMORY))
    ceiling, source = min(bounds, key=lambda bound: bound[0], default=(None, ""))
    # A wider limit that is nearly full can leave less than the lowest one: its headroom counts then.
    rooms = [limit - held for limit, where in bounds if (held := _held(tree, where, total, available)) is not None]
    used = max(0, ceiling - min(rooms)) if rooms and ceiling is not None else None
    return MemoryFacts(
        total_bytes=total,
        available_bytes=available,
        swap_total_bytes=sizes.get("SwapTotal"),
        limits=limits,
        ceiling_bytes=ceiling,
        ceiling_source=source or "unknown",
        used_bytes=used,
    )
