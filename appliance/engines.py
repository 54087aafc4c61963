"""PURE: how many engines one worker runs, and on which CPUs each of them.

Several engines are vLLM's data parallelism: each holds the whole model and computes its own requests, on the cores and
in the memory of one NUMA node; one API server shares the requests out. One answer is not faster for it, more answers
come at the same time. Rules: the operator's word first; by itself one engine for each NUMA node that has memory and
about as many cores as the largest, as far as the CPU quota pays for whole engines; one engine where the operator chose
threads or CPUs, where one over all nodes was measured to be the fastest, and for models with experts, whose engines
vLLM couples step by step. Whether it fits is the memory arithmetic's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.facts import Core, TopologyFacts
from appliance.settings import Settings
from appliance.threads import ThreadChoice, computing_cores

NEAR_SHARE = 0.9
"""A node with fewer of the largest node's cores is left out: all engines get as many threads, and requests evenly."""


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """`cpus`: the logical CPUs of each engine, in the order of vLLM's ranks; empty for one engine, which `threads`
    describes whole. `nodes`: the NUMA node of each; `threads`: of each; `reason`: empty where there is nothing to
    choose."""

    cpus: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[int | None, ...] = ()
    threads: int = 0
    reason: str = ""
    evidence: str = "sysfs topology"

    @property
    def count(self) -> int:
        return max(1, len(self.cpus))

    @property
    def apart(self) -> bool:
        """Whether the engines lie on several nodes, so that each needs its weights in memory of its own."""
        return len(set(self.nodes)) > 1

    def most_on_a_node(self) -> int:
        return max((self.nodes.count(node) for node in self.nodes), default=1)


def choose_engines(topology: TopologyFacts, settings: Settings, threads: ThreadChoice, *,
                   experts: bool) -> EngineChoice:
    """Engines for this topology. `threads`: what one engine would get; `settings` have passed `engines_refusal`."""
    wanted, groups = settings.cpu.engines, _groups(topology, settings)
    if wanted is not None:
        if wanted == 1:
            return EngineChoice(reason="set by the operator", evidence="settings cpu.engines")
        return _divided(topology, settings, groups, wanted)
    if len(groups) < 2:
        return EngineChoice()
    if experts:
        return EngineChoice(reason="vLLM couples the engines of a model with experts step by step", evidence="model")
    if settings.cpu.threads or settings.cpu.cpus:
        return EngineChoice(reason="threads or CPUs are set by the operator; cpu.engines would ask for more",
                            evidence="settings cpu")
    if threads.cpus is None:
        return EngineChoice(reason="one engine over all NUMA nodes is the fastest for one request",
                            evidence=threads.evidence)
    return _one_a_node(topology, groups, threads)


def engines_refusal(topology: TopologyFacts, settings: Settings, *, experts: bool) -> str | None:
    """Why the number of engines that the operator wants is impossible here, or None."""
    wanted = settings.cpu.engines or 1
    cores = sum(len(group) for group in _groups(topology, settings).values())
    if wanted > 1 and experts:
        return "vLLM couples the engines of a model with experts step by step: one engine only"
    if wanted > max(1, cores):
        return f"{wanted} engines want as many cores; {cores} can be used"
    return None


def _one_a_node(topology: TopologyFacts, groups: Mapping[int | None, Sequence[Core]],
                threads: ThreadChoice) -> EngineChoice:
    largest = max(len(cores) for cores in groups.values())
    near = [node for node, cores in groups.items() if len(cores) >= largest * NEAR_SHARE]
    each = min(threads.count, *(len(groups[node]) for node in near))
    notes = [f"NUMA node {node} left out: it has fewer cores" for node in groups if node not in near]
    paid = int(topology.quota.cpus) // each if topology.quota is not None else len(near)
    if paid < 2 and topology.quota is not None:
        return EngineChoice(reason=f"the CPU quota pays for one engine of {each} threads",
                            evidence=topology.quota.source)
    if paid < len(near) and topology.quota is not None:
        notes.append(f"the CPU quota of {topology.quota.cpus:g} pays for no more")
        near = near[:paid]
    if len(near) < 2:
        return EngineChoice(reason="; ".join(["one NUMA node has most of the cores", *notes]))
    return EngineChoice(
        cpus=tuple(_cpus(groups[node]) for node in near), nodes=tuple(near), threads=each,
        reason="; ".join(["one for each NUMA node, on its own cores and in its own memory", *notes]))


def _divided(topology: TopologyFacts, settings: Settings, groups: Mapping[int | None, Sequence[Core]],
             wanted: int) -> EngineChoice:
    """The operator's number of engines, spread over the nodes, and each node's cores in equal parts."""
    shares = dict.fromkeys(groups, 0)
    for _ in range(wanted):  # the next one goes where it gets most cores
        shares[max(groups, key=lambda node: len(groups[node]) / (shares[node] + 1))] += 1
    parts = [(node, part) for node in groups for part in _parts(groups[node], shares[node])]
    each = settings.cpu.threads or min(len(part) for _, part in parts)
    if topology.quota is not None and not settings.cpu.threads:
        each = max(1, min(each, int(topology.quota.cpus) // wanted))
    return EngineChoice(cpus=tuple(_cpus(part) for _, part in parts), nodes=tuple(node for node, _ in parts),
                        threads=each, reason="set by the operator", evidence="settings cpu.engines")


def _groups(topology: TopologyFacts, settings: Settings) -> dict[int | None, list[Core]]:
    """The cores that may compute, by NUMA node; nodes without memory are none, unless no node is known to have any."""
    cores, _ = computing_cores(topology)
    chosen = settings.cpu.cpus
    if chosen:
        cores = tuple(Core(cpus=tuple(cpu for cpu in core.cpus if cpu in chosen), kind=core.kind, node=core.node)
                      for core in topology.cores if set(core.cpus) & set(chosen))
    memory = {node.node for node in topology.nodes if node.memory_bytes}
    groups: dict[int | None, list[Core]] = {}
    for core in sorted(cores, key=lambda core: (core.node if core.node is not None else -1, core.cpus)):
        if not memory or core.node in memory:
            groups.setdefault(core.node, []).append(core)
    return groups


def _parts(cores: Sequence[Core], count: int) -> list[Sequence[Core]]:
    """The cores in order, in `count` parts that differ by one core at most."""
    return [cores[len(cores) * part // count : len(cores) * (part + 1) // count] for part in range(count)]


def _cpus(cores: Sequence[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))
