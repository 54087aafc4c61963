"""PURE: how many threads the worker gets, and on which CPUs.

One thread per physical performance core of one NUMA node, never more than the CPU quota pays for; the operator's word
always wins. Rules of thumb, until a node has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.facts import TopologyFacts
from appliance.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ThreadChoice:
    """`cpus`: logical CPUs the worker is confined to; None leaves all allowed CPUs to it."""

    count: int
    cpus: tuple[int, ...] | None
    reason: str
    evidence: str


def choose_threads(topology: TopologyFacts, settings: Settings) -> ThreadChoice:
    """Threads for this topology. Never less than one, even where nothing is known of the cores."""
    if settings.cpu.cpus:
        usable = tuple(c for c in settings.cpu.cpus if c in topology.allowed) or topology.allowed
        count = settings.cpu.threads or len(usable)
        return ThreadChoice(count=count, cpus=usable, reason="CPUs set by the operator", evidence="settings cpu.cpus")
    cores = topology.cores
    kinds = {core.kind for core in cores}
    notes: list[str] = []
    if "performance" in kinds and "efficiency" in kinds:
        cores = tuple(core for core in cores if core.kind == "performance")
        notes.append("efficiency cores left out: the slowest thread sets the pace of every layer")
    nodes = sorted({core.node for core in cores if core.node is not None})
    if len(nodes) > 1:
        best = max(nodes, key=lambda node: (sum(core.node == node for core in cores), -node))
        cores = tuple(core for core in cores if core.node == best)
        notes.append(f"NUMA node {best} only: remote memory is slower than fewer threads")
    chosen = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    cpus = chosen if notes and chosen else None
    count = len(cores) or len(topology.allowed) or 1
    idle = ", none for SMT siblings" if topology.smt and len(cores) < len(chosen) else ""
    reason = f"one thread per physical core{idle}"
    evidence = "sysfs topology"
    if topology.quota is not None and int(topology.quota.cpus) < count:
        count = max(1, int(topology.quota.cpus))
        reason, evidence = f"the CPU quota allows {topology.quota.cpus:g} CPUs", topology.quota.source
    if settings.cpu.threads:
        count, reason, evidence = settings.cpu.threads, "set by the operator", "settings cpu.threads"
    return ThreadChoice(count=count, cpus=cpus, reason="; ".join([reason, *notes]), evidence=evidence)
