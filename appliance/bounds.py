"""PURE: how much memory a worker may use on this host, and what is said when that is too little.

    lowest_ceiling   the lowest limit, and whose it is
    usable_bytes     what is left of it: the reserve stays free, and what others hold is theirs
    node_bytes       what each of several engines may use of the NUMA node it lies on
    misfit           the refusal, with the memory that would be enough

The need itself is the arithmetic of `appliance.budget`. No I/O here.
"""

from __future__ import annotations

from appliance import budget
from appliance.budget import show
from appliance.engines import EngineChoice
from appliance.facts import HostFacts
from appliance.fitting import Fitting
from appliance.refusal import Refusal
from appliance.settings import Settings

NUMA_BOUND = "NUMA node"
UNKNOWN_CEILING = Refusal(exit_code=76, what="the memory ceiling is unknown", do="set memory.ceiling in the settings",
                          why="neither /proc/meminfo nor a cgroup limit can be read")


def lowest_ceiling(host: HostFacts, settings: Settings, cpus: tuple[int, ...] | None,
                   engines: EngineChoice) -> tuple[int | None, str]:
    """The lowest of the node's own ceiling, the operator's, and the NUMA node that one engine runs on: vLLM refuses a
    cache that does not lie there whole."""
    bounds = [(host.memory.ceiling_bytes, host.memory.ceiling_source),
              (settings.memory.ceiling, "settings memory.ceiling")]
    if not engines.cpus and sum(bool(node.memory_bytes) for node in host.topology.nodes) > 1:
        first = min(cpus or host.topology.allowed, default=None)
        bounds += [(node.memory_bytes, f"{NUMA_BOUND} {node.node}, which the worker runs on")
                   for node in host.topology.nodes if first in node.cpus]
    known = [(size, source) for size, source in bounds if size is not None]
    return min(known, key=lambda bound: bound[0], default=(None, host.memory.ceiling_source))


def node_bytes(host: HostFacts, settings: Settings, engines: EngineChoice) -> int | None:
    """What each of several engines may use of its NUMA node; None where there is only one node with memory."""
    nodes = [node for node in host.topology.nodes if node.memory_bytes]
    sizes = [node.memory_bytes or 0 for node in nodes if node.node in engines.nodes]
    if len(nodes) < 2 or not sizes:
        return None
    return (min(sizes) - budget.reserve_bytes(min(sizes), settings.memory.reserve)) // engines.most_on_a_node()


def usable_bytes(host: HostFacts, ceiling: int | None, settings: Settings) -> int | None:
    """What the worker may use: the ceiling less its reserve; and of what is free below the node's own ceiling and on
    the host now, all but the operator's reserve (or 128 MiB)."""
    if ceiling is None:
        return None
    usable = ceiling - budget.reserve_bytes(ceiling, settings.memory.reserve)
    keep = settings.memory.reserve if settings.memory.reserve is not None else budget.LEAST_RESERVE_BYTES
    if host.memory.ceiling_bytes is not None and host.memory.used_bytes is not None:
        usable = min(usable, host.memory.ceiling_bytes - host.memory.used_bytes - keep)
    if host.memory.available_bytes is not None:
        usable = min(usable, host.memory.available_bytes - keep)
    return max(usable, 0)


def misfit(fitting: Fitting, ceiling_now: int, usable: int, settings: Settings) -> Refusal:
    shape = fitting.smallest()
    if fitting.engines > 1:
        return Refusal(exit_code=76, what=f"{fitting.model.name} does not fit with {fitting.engines} engines",
                       why=f"{shape.context} tokens of context need {show(fitting.needed_bytes(shape))}, usable are "
                           f"{show(usable)}" + ("" if fitting.node_bytes is None else
                                                f", {show(fitting.node_bytes)} for each on its NUMA node"),
                       do="set cpu.engines to auto, or use a smaller model")
    need, reserve = fitting.needed_bytes(shape), settings.memory.reserve
    if need <= ceiling_now - budget.reserve_bytes(ceiling_now, reserve):
        # Only what others hold at this moment stands against it: a later try may succeed.
        return Refusal(exit_code=75, what=f"{fitting.model.name} does not fit now",
                       why=f"{shape.context} tokens of context need {show(need)}, free are {show(usable)} of a ceiling "
                           f"of {show(ceiling_now)}", do="stop other programs, or use a smaller model")
    ceiling = need + reserve if reserve is not None else max(need * 10 // 9 + 1, need + 128 * budget.MIB)
    return Refusal(exit_code=76, what=f"{fitting.model.name} does not fit",
                   why=f"{shape.context} tokens of context need {show(need)}, usable are {show(usable)}",
                   do=f"have {show(need)} free and raise the memory ceiling to {show(ceiling)} or more, "
                      "or use a smaller model")
