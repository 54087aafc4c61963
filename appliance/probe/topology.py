"""Cores, SMT, core kinds and NUMA nodes, from sysfs alone: no lscpu, no locale.

Rules: only CPUs that are online and allowed (affinity and cpuset) make up `cores`; a field that the kernel does not
show is None and never an exception. A CPU without sibling information is taken as a core of its own.
"""

from __future__ import annotations

import re

from appliance.facts import Core, NumaNode, TopologyFacts
from appliance.probe.cgroup import read_cpu_quota, read_cpuset
from appliance.probe.memory import parse_meminfo
from appliance.probe.tree import Tree, parse_cpu_list

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"
EFFICIENCY_CAPACITY = 0.75
"""A core below this share of the largest cpu_capacity is an efficiency core; favoured cores differ by a few percent."""


def read_topology(tree: Tree, affinity: tuple[int, ...] | None) -> TopologyFacts:
    """`affinity`: what sched_getaffinity says, None = unknown: ask /proc/self/status."""
    online = _online(tree)
    if affinity is None:
        affinity = parse_allowed(tree.read("/proc/self/status"))
    else:
        # The kernel names online CPUs only, and inside LXC it is right where a made-up `online` list is not.
        online = tuple(sorted({*online, *affinity}))
    cpuset = read_cpuset(tree)
    allowed = tuple(
        cpu for cpu in online if (affinity is None or cpu in affinity) and (cpuset is None or cpu in cpuset)
    )
    siblings = {cpu: _siblings(tree, cpu) for cpu in online}
    nodes = _nodes(tree)
    return TopologyFacts(
        online=online,
        allowed=allowed,
        cores=_cores(tree, allowed, siblings, nodes),
        smt=_smt(siblings),
        nodes=nodes,
        quota=read_cpu_quota(tree),
    )


def parse_allowed(status: str | None) -> tuple[int, ...] | None:
    """Cpus_allowed_list of /proc/self/status."""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status or "", re.MULTILINE)
    return parse_cpu_list(match[1]) if match else None


def _online(tree: Tree) -> tuple[int, ...]:
    online = parse_cpu_list(tree.read(f"{CPU}/online"))
    if online:
        return online
    listed = re.findall(r"^processor\s*:\s*(\d+)", tree.read("/proc/cpuinfo") or "", re.MULTILINE)
    return tuple(sorted(map(int, listed)))


def _siblings(tree: Tree, cpu: int) -> tuple[int, ...] | None:
    """All threads of this CPU's core, itself included; None when the kernel does not say."""
    for name in ("core_cpus_list", "thread_siblings_list"):
        siblings = parse_cpu_list(tree.read(f"{CPU}/cpu{cpu}/topology/{name}"))
        if siblings and cpu in siblings:
            return siblings
    return None


def _smt(siblings: dict[int, tuple[int, ...] | None]) -> bool | None:
    """Whether any core has more than one thread online (the kernel leaves offline ones out of its lists)."""
    known = [threads for threads in siblings.values() if threads is not None]
    return any(len(threads) > 1 for threads in known) if known else None


def _nodes(tree: Tree) -> tuple[NumaNode, ...]:
    nodes = []
    for name in tree.names(NODE):
        match = re.fullmatch(r"node(\d+)", name)
        if match:
            memory = parse_meminfo(tree.read(f"{NODE}/{name}/meminfo")).get("MemTotal")
            cpus = parse_cpu_list(tree.read(f"{NODE}/{name}/cpulist")) or ()
            nodes.append(NumaNode(node=int(match[1]), cpus=cpus, memory_bytes=memory))
    return tuple(sorted(nodes, key=lambda node: node.node))


def _cores(
    tree: Tree, allowed: tuple[int, ...], siblings: dict[int, tuple[int, ...] | None], nodes: tuple[NumaNode, ...]
) -> tuple[Core, ...]:
    kinds = _kinds(tree, allowed)
    node_of = {cpu: node.node for node in nodes for cpu in node.cpus}
    cores: list[Core] = []
    left = set(allowed)
    for first in allowed:
        cpus = tuple(cpu for cpu in siblings[first] or (first,) if cpu in left)
        if first in left:
            cores.append(Core(cpus=cpus, kind=kinds.get(first), node=node_of.get(first)))
            left.difference_update(cpus)
    return tuple(cores)


def _kinds(tree: Tree, allowed: tuple[int, ...]) -> dict[int, str]:
    """CPU -> kind; empty where all cores are of one kind or nothing is known."""
    # Intel hybrid parts have one PMU per core kind, on every kernel since 5.13.
    performance = parse_cpu_list(tree.read("/sys/devices/cpu_core/cpus"))
    efficiency = parse_cpu_list(tree.read("/sys/devices/cpu_atom/cpus"))
    if performance and efficiency:
        return {**dict.fromkeys(performance, "performance"), **dict.fromkeys(efficiency, "efficiency")}
    capacities = {cpu: tree.read_int(f"{CPU}/cpu{cpu}/cpu_capacity") for cpu in allowed}
    known = {cpu: capacity for cpu, capacity in capacities.items() if capacity is not None}
    slow = {cpu for cpu, capacity in known.items() if capacity < EFFICIENCY_CAPACITY * max(known.values())}
    return {cpu: "efficiency" if cpu in slow else "performance" for cpu in known} if slow else {}
