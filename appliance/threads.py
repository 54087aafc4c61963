"""PURE: how many threads an engine gets, and on which CPUs; `appliance.engines` says how many engines there are.

Measured on this node with this model where that was done; else one thread per physical performance core of one NUMA
node. Never more than the CPU quota pays for; the operator's word always wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from appliance.facts import Core, TopologyFacts
from appliance.measured import PREFILL_TOK_S, SAME, TOK_S, Trial, by_threads, cite, reaches
from appliance.refusal import ranges
from appliance.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ThreadChoice:
    """`cpus`: logical CPUs the worker is confined to; None leaves all allowed CPUs to it."""

    count: int
    cpus: tuple[int, ...] | None
    reason: str
    evidence: str


def choose_threads(topology: TopologyFacts, settings: Settings, tried: Sequence[Trial] = ()) -> ThreadChoice:
    """Threads for this topology. Never less than one, even where nothing is known of the cores. `tried`: fresh trials
    of the model with different threads."""
    if settings.cpu.cpus:
        usable = tuple(c for c in settings.cpu.cpus if c in topology.allowed) or topology.allowed
        count = settings.cpu.threads or len(usable)
        return ThreadChoice(count=count, cpus=usable, reason="CPUs set by the operator", evidence="settings cpu.cpus")
    rule = _by_rule(topology)
    if settings.cpu.threads:
        return replace(rule, count=settings.cpu.threads, evidence="settings cpu.threads",
                       reason="; ".join(["set by the operator", *rule.reason.split("; ")[1:]]))
    return _by_measure(topology, rule, tried) or rule


def candidates(topology: TopologyFacts) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """Threads and CPUs worth trying on this node, the rule's own first; none that the quota does not pay for."""
    rule = _by_rule(topology)
    most = int(topology.quota.cpus) if topology.quota else len(topology.allowed)
    seen = set()
    counts = (rule.count, rule.count - 1, rule.count * 3 // 4, rule.count // 2, rule.count // 4, 1)
    everywhere = len(topology.cores)
    siblings = len(rule.cpus) if rule.cpus is not None else len(topology.allowed)
    wanted = [*((count, rule.cpus) for count in counts), (siblings, rule.cpus), (everywhere, None)]
    for count, cpus in wanted:
        if 1 <= count <= max(1, most) and (count, cpus) not in seen:
            seen.add((count, cpus))
            yield count, cpus


def _by_measure(topology: TopologyFacts, rule: ThreadChoice, tried: Sequence[Trial]) -> ThreadChoice | None:
    """The fastest at one token; of those that are as fast the fastest at prompts, then the one with fewest threads."""
    most = int(topology.quota.cpus) if topology.quota else len(topology.allowed)
    usable = [trial for trial in by_threads(tried) if not trial.failure and trial.median(TOK_S) > 0
              and 1 <= int(trial.settings["threads"]) <= max(1, most)]
    if len(usable) < 2 and not any(trial.failure for trial in tried):
        return None  # one figure alone compares nothing
    fastest = max((trial.median(TOK_S) for trial in usable), default=0.0)
    equal = [trial for trial in usable if reaches(trial, TOK_S, fastest)]
    if not equal:
        return None
    prompts = max(trial.median(PREFILL_TOK_S) for trial in equal)
    if not prompts:  # of equals the most threads: prompts, which compute, were not measured and want them
        equal.reverse()
    chosen = next(trial for trial in equal if trial.median(PREFILL_TOK_S) >= prompts * (1 - SAME))
    count, cpus = int(chosen.settings["threads"]), chosen.settings.get("cpus")
    reason = "fastest of those measured" + ("" if count == rule.count else f"; the rule of thumb says {rule.count}")
    if rule.cpus is not None and cpus == ranges(rule.cpus):
        reason = "; ".join([reason, *rule.reason.split("; ")[1:]])
    return ThreadChoice(count=count, cpus=rule.cpus if cpus else None, reason=reason,
                        evidence=cite(by_threads(tried), TOK_S, "tok/s"))


def computing_cores(topology: TopologyFacts) -> tuple[tuple[Core, ...], list[str]]:
    """The cores that are worth a thread, and what was left out."""
    kinds = {core.kind for core in topology.cores}
    if "performance" in kinds and "efficiency" in kinds:
        return (tuple(core for core in topology.cores if core.kind == "performance"),
                ["efficiency cores left out: the slowest thread sets the pace of every layer"])
    return topology.cores, []


def _by_rule(topology: TopologyFacts) -> ThreadChoice:
    cores, notes = computing_cores(topology)
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
    return ThreadChoice(count=count, cpus=cpus, reason="; ".join([reason, *notes]), evidence=evidence)
