"""How a running process's control group fares: CPU throttling, stalls for memory, OOM kills, swap; slow and hot CPUs.

Figures only, from files below a root folder; nothing is judged and nothing is measured over time: the kernel keeps the
averages. v1, v2 and hybrid hierarchies, as in `probe.cgroup`. What cannot be read is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from appliance.probe.cgroup import Hierarchy, find_hierarchy, parse_cgroup, parse_limit, parse_mountinfo, parse_stat
from appliance.probe.memory import parse_meminfo
from appliance.probe.tree import Tree

LEAST_PERIODS = 600
"""Fewer periods of a CPU quota (a minute) say nothing."""
DYNAMIC_DRIVERS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""With these, `powersave` is the ordinary governor: it raises the clock under load."""


@dataclass(frozen=True, kw_only=True)
class Strain:
    """`throttled_share`: of the quota's periods, at the level that suffers most. `stalled_percent`: PSI `full` over the
    last minute. `high_bytes`: the lowest soft limit. `oom_kills`: counted in the own group. `periods`: of the quota and
    throttled ones, for each level. `too_hot`: how often CPUs have lowered their clock for heat since boot (Intel)."""

    throttled_share: float | None
    stalled_percent: float | None
    high_bytes: int | None
    oom_kills: int | None
    governor: str | None
    periods: tuple[tuple[int, int], ...] = ()
    too_hot: int | None = None


def read_strain(tree: Tree, *, pid: int | str = "self") -> Strain:
    """The strain on the process `pid`."""
    paths = parse_cgroup(tree.read(f"/proc/{pid}/cgroup"))
    mounts = parse_mountinfo(tree.read("/proc/self/mountinfo"))
    memory = find_hierarchy("memory", paths, mounts)
    periods = tuple(_periods(tree, find_hierarchy("cpu", paths, mounts)))
    shares = [throttled / total for total, throttled in periods if total >= LEAST_PERIODS]
    limits = [parse_limit(tree.read(f"{folder}/memory.high")) for folder in memory.folders]
    return Strain(
        throttled_share=max(shares, default=None), stalled_percent=_stalled(tree, memory),
        high_bytes=min((limit for limit in limits if limit is not None), default=None),
        oom_kills=_oom_kills(tree, memory), governor=slow_governor(tree),
        periods=periods, too_hot=_too_hot(tree),
    )


def swapped_bytes(tree: Tree, pids: Iterable[int]) -> int | None:
    """What of some processes is swapped out; None when none of them can be read."""
    found = [parse_meminfo(tree.read(f"/proc/{pid}/status")).get("VmSwap") for pid in pids]
    known = [size for size in found if size is not None]
    return sum(known) if known else None


def slow_governor(tree: Tree) -> str | None:
    """The governor that keeps the clock low, with its driver; None when the clock may rise or nothing is known."""
    folder = "/sys/devices/system/cpu/cpu0/cpufreq"
    governor, driver, preference = ((tree.read(f"{folder}/{name}") or "").strip() for name in
                                    ("scaling_governor", "scaling_driver", "energy_performance_preference"))
    if governor != "powersave":
        return None
    if driver in DYNAMIC_DRIVERS:
        return f"powersave with the preference `power` ({driver})" if preference == "power" else None
    return f"powersave ({driver or 'unknown driver'})"


def _periods(tree: Tree, hierarchy: Hierarchy) -> Iterator[tuple[int, int]]:
    for folder in hierarchy.folders:
        stat = parse_stat(tree.read(f"{folder}/cpu.stat"))
        if "nr_periods" in stat:
            yield stat["nr_periods"], stat.get("nr_throttled", 0)


def _too_hot(tree: Tree) -> int | None:
    """Each core counts its own events, and all of them those of the package."""
    folders = [f"/sys/devices/system/cpu/{name}/thermal_throttle" for name in tree.names("/sys/devices/system/cpu")
               if re.fullmatch(r"cpu\d+", name)]
    cores = [tree.read_int(f"{folder}/core_throttle_count") for folder in folders]
    packages = [tree.read_int(f"{folder}/package_throttle_count") for folder in folders]
    known = [count for count in cores if count is not None]
    return sum(known) + max((count for count in packages if count is not None), default=0) if known else None


def _stalled(tree: Tree, memory: Hierarchy) -> float | None:
    """Of the own group where the kernel keeps it there (v2), else of the whole machine."""
    places = [f"{memory.folders[0]}/memory.pressure"] if memory.version == 2 and memory.folders else []
    for place in (*places, "/proc/pressure/memory"):
        if match := re.search(r"^full .*\bavg60=(\d+(?:\.\d+)?)", tree.read(place) or "", re.MULTILINE):
            return float(match[1])
    return None


def _oom_kills(tree: Tree, memory: Hierarchy) -> int | None:
    name = "memory.events" if memory.version == 2 else "memory.oom_control"
    return parse_stat(tree.read(f"{memory.folders[0]}/{name}")).get("oom_kill") if memory.folders else None
