"""PURE: how much memory a worker may use on this host, and what is said when that is too little.

    best_fit         one engine or several, with the shape that fits
    lowest_ceiling   the lowest limit, and whose it is
    usable_bytes     what is left of it: the reserve stays free, and what others hold is theirs
    node_bytes       what each of several engines may use of the NUMA node it lies on
    misfit           the refusal, with the memory that would be enough

The need itself is the arithmetic of `appliance.budget`. No I/O here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance import budget
from appliance.budget import Shape, show
from appliance.engines import EngineChoice
from appliance.facts import HostFacts
from appliance.fitting import Fitting, lost
from appliance.refusal import Refusal
from appliance.settings import Settings

NUMA_BOUND = "NUMA node"
UNKNOWN_CEILING = Refusal(exit_code=76, what="the memory ceiling is unknown", do="set memory.ceiling in the settings",
                          why="neither /proc/meminfo nor a cgroup limit can be read")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a worker may use on this host, and the shape that fits into it: None where none does."""

    fitting: Fitting
    engines: EngineChoice
    shape: Shape | None
    ceiling_bytes: int
    ceiling_source: str
    usable_bytes: int


def best_fit(host: HostFacts, settings: Settings, fitting: Fitting, engines: EngineChoice,
             cpus: tuple[int, ...] | None) -> Fit | None:
    """`fitting`, `cpus`: of one engine. Several, where `engines` are several and either the operator wants them or
    nothing is lost by them. None where the ceiling is unknown."""
    if not engines.cpus:
        return _fit(host, settings, fitting, engines, cpus)
    several = _fit(host, settings, replace(
        fitting, running=running(settings, engines.threads, engines.count), engines=engines.count,
        copies=engines.count if engines.apart else 1, node_bytes=node_bytes(host, settings, engines)), engines, cpus)
    if settings.cpu.engines is not None:
        return several
    one = _fit(host, settings, fitting, EngineChoice(), cpus)
    if one is not None and (worse := lost(one.shape, several.shape if several else None)):
        return replace(one, engines=EngineChoice(reason=f"{engines.count} engines {worse}",
                                                 evidence="memory arithmetic"))
    return several


def running(settings: Settings, threads: int, engines: int = 1) -> int:
    """Requests that each of so many engines computes at the same time: the operator's number shared out, or as many as
    its threads are good for."""
    if settings.max_running:
        return -(-settings.max_running // engines)
    return 8 if threads <= 4 else 16 if threads <= 16 else 32


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


def misfit(fit: Fit, settings: Settings) -> Refusal:
    """Why not even the smallest shape fits: for now (75, tried again) or for good (76, not started again)."""
    fitting, ceiling_now, usable = fit.fitting, fit.ceiling_bytes, fit.usable_bytes
    shape = fitting.smallest()
    need, reserve = fitting.needed_bytes(shape), settings.memory.reserve
    with_engines = f" with {fitting.engines} engines" if fitting.engines > 1 else ""
    if fitting.fits(shape, ceiling_now - budget.reserve_bytes(ceiling_now, reserve)):
        # Only what others hold at this moment stands against it: a later try may succeed.
        return Refusal(exit_code=75, what=f"{fitting.model.name} does not fit{with_engines} now",
                       why=f"{shape.context} tokens of context need {show(need)}, free are {show(usable)} of a ceiling "
                           f"of {show(ceiling_now)}",
                       do="stop other programs, " + ("set cpu.engines to auto, " if with_engines else "") +
                          "or use a smaller model")
    if with_engines:
        return Refusal(exit_code=76, what=f"{fitting.model.name} does not fit{with_engines}",
                       why=f"{shape.context} tokens of context need {show(need)}, usable are "
                           f"{show(usable)}" + ("" if fitting.node_bytes is None else
                                                f", {show(fitting.node_bytes)} for each on its NUMA node"),
                       do="set cpu.engines to auto, or use a smaller model")
    ceiling = need + reserve if reserve is not None else max(need * 10 // 9 + 1, need + 128 * budget.MIB)
    return Refusal(exit_code=76, what=f"{fitting.model.name} does not fit",
                   why=f"{shape.context} tokens of context need {show(need)}, usable are {show(usable)}",
                   do=f"have {show(need)} free and raise the memory ceiling to {show(ceiling)} or more, "
                      "or use a smaller model")


def _fit(host: HostFacts, settings: Settings, fitting: Fitting, engines: EngineChoice,
         cpus: tuple[int, ...] | None) -> Fit | None:
    ceiling, source = lowest_ceiling(host, settings, cpus, engines)
    usable = usable_bytes(host, ceiling, settings)
    if ceiling is None or usable is None:
        return None
    return Fit(fitting=fitting, engines=engines, shape=fitting.fit(usable), ceiling_bytes=ceiling,
               ceiling_source=source, usable_bytes=usable)
