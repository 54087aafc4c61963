"""The node's limits while the worker runs: what changed since it was planned, and what strains it.

Does: look every LOOK_S in the background at memory ceiling, CPU quota, allowed CPUs, throttling and memory pressure;
warn of what differs from the plan. Does not: plan, or restart. Rules: what changed is planned anew at the next safe
moment, which is when nobody has asked for anything for IDLE_S; a plan that would start the same worker restarts
nothing, one that refuses is a warning; what strains is a warning, gone when it is over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.budget import show
from appliance.facts import HostFacts, MemoryFacts, TopologyFacts
from appliance.probe.memory import read_memory
from appliance.probe.strain import Strain, read_strain
from appliance.probe.topology import read_topology
from appliance.probe.tree import Tree
from appliance.supervisor.background import Background

LOOK_S = 15.0
IDLE_S = 30.0
CEILING_SHARE = 0.02
"""A ceiling that moved by less is the same: MemTotal of a virtual machine breathes."""
THROTTLED_SHARE, LEAST_PERIODS = 0.2, 50
"""Of the quota's periods since the last look, where there were enough of them."""
STALLED_PERCENT = 10.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`quota_cpus`: None where there is none."""

    ceiling_bytes: int | None
    ceiling_source: str
    quota_cpus: float | None
    allowed: tuple[int, ...]


def of(memory: MemoryFacts, topology: TopologyFacts) -> Limits:
    return Limits(ceiling_bytes=memory.ceiling_bytes, ceiling_source=memory.ceiling_source,
                  quota_cpus=topology.quota.cpus if topology.quota else None, allowed=topology.allowed)


def read(root: Path = Path("/")) -> tuple[Limits, Strain]:
    tree = Tree(root=root)
    return of(read_memory(tree), read_topology(tree, tuple(sorted(os.sched_getaffinity(0))))), read_strain(tree)


def difference(planned: Limits, now: Limits) -> str:
    """What changed, as `name old -> new` parts; empty when nothing did that matters."""
    return "; ".join(_parts(planned, now))


def _parts(planned: Limits, now: Limits) -> Iterator[str]:
    before, after = planned.ceiling_bytes, now.ceiling_bytes
    if before and after and abs(after - before) > before * CEILING_SHARE:
        yield f"memory ceiling {show(before)} -> {show(after)} ({now.ceiling_source})"
    if planned.quota_cpus != now.quota_cpus:
        yield f"CPU quota {_cpus(planned.quota_cpus)} -> {_cpus(now.quota_cpus)}"
    if planned.allowed != now.allowed:
        yield f"CPUs {len(planned.allowed)} -> {len(now.allowed)}"


def _cpus(quota: float | None) -> str:
    return "none" if quota is None else f"{quota:g}"


def strain_warning(strain: Strain, before: Strain | None) -> str:
    """One sentence for what strains the service now; empty when nothing does. `before`: the look before this one."""
    if before is not None and (strain.oom_kills or 0) > (before.oom_kills or 0):
        return "the kernel has killed a process of this service for memory"
    if strain.stalled_percent is not None and strain.stalled_percent > STALLED_PERCENT:
        return f"memory is short: all tasks stood still {strain.stalled_percent:.0f} % of the last minute"
    share = max(_throttled(strain, before), default=0.0) if before is not None else 0.0
    if share > THROTTLED_SHARE:
        return f"the CPU quota slows the service down in {share:.0%} of its periods"
    if before is not None and before.too_hot is not None and (strain.too_hot or 0) > before.too_hot:
        return f"the CPU is too hot: it lowered its clock {(strain.too_hot or 0) - before.too_hot} times just now"
    return ""


def _throttled(strain: Strain, before: Strain) -> Iterator[float]:
    """The share of throttled periods between two looks, for each level of control groups that both have seen."""
    for (total, throttled), (total_before, throttled_before) in zip(strain.periods, before.periods, strict=False):
        if total - total_before >= LEAST_PERIODS:
            yield (throttled - throttled_before) / (total - total_before)


class LimitWatch:
    """`warn`: receives a topic and a sentence, empty when there is nothing to warn of any more."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self._planned: Limits | None = None
        self._found: Limits | None = None
        self._changed = ""
        self._look: Background[tuple[Limits, Strain]] | None = None
        self._looked = 0.0
        self._replan: Background[str | None] | None = None
        self._strain: Strain | None = None
        self._busy = 0.0

    def plan(self, host: HostFacts) -> None:
        """The facts that the running worker was planned with."""
        self._planned, self._changed, self._replan = of(host.memory, host.topology), "", None
        self._warn("limits", "")

    def tick(self, now: float, *, idle: bool, outdated: Callable[[], str | None]) -> bool:
        """Look when it is time. True when a new plan is due, differs, and would disturb nobody now.

        `outdated`: None when a plan made now starts the same worker, empty when another, else why it is refused.
        """
        self._busy = self._busy if idle else now
        if self._look is not None and self._look.done:
            if self._look.result is not None:
                self._take(*self._look.result)
            self._look = None
        if self._look is None and now - self._looked >= LOOK_S:
            self._looked = now
            self._look = Background(read, name="limits")
        if self._replan is None and self._changed and now - self._busy >= IDLE_S:
            self._replan = Background(outdated, name="plan")
        if self._replan is None or not self._replan.done:
            return False
        refused = self._replan.result
        if refused == "" and now - self._busy < IDLE_S:
            self._replan = None  # somebody asked meanwhile: planned again at the next safe moment
            return False
        self._replan = None
        changed, self._changed, self._planned = self._changed, "", self._found
        self._warn("limits", f"{changed}: {refused}" if refused else "")
        return refused == ""

    def _take(self, found: Limits, strain: Strain) -> None:
        self._warn("strain", strain_warning(strain, self._strain))
        self._found, self._strain = found, strain
        changed = difference(self._planned, found) if self._planned is not None else ""
        if changed != self._changed:
            self._changed = changed
            self._warn("limits", changed and f"planned anew when idle: {changed}")
