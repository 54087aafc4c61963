"""Which orders a measuring child gets for a node and a model.

Sizes are kept below what the node can spare; every order says on which CPUs and with how many threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from appliance.budget import MIB
from appliance.facts import HostFacts, ModelFacts
from appliance.measured import BANDWIDTH, CANARY, GEMMS, INT4, OWN, PREFILL_ROWS, WEIGHTS, Trial
from appliance.quantize.format import parse_config
from appliance.refusal import ranges
from appliance.settings import Settings
from appliance.threads import candidates, choose_threads
from appliance.tune.subject import Subject

CANARY_ROWS = (1, 2, 7, 8, 9, 64)
CANARY_TIMES = 200
TABLE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Row counts of the table of kernels; a quick run measures the first, the fourth and a prompt."""
QUICK_ROWS = (1, 8, PREFILL_ROWS)
LIBRARY_ROWS = (1, 16, 32, 64, 128, PREFILL_ROWS)
"""Where torch's GEMM may overtake the native kernel on an AMX host."""
LEAST_MIB, MOST_MIB = 64, 1024
BF16_TIERS = ("avx512_bf16", "amx")
SPARE_SHARE = 4
"""A measuring child takes at most this part (a quarter) of the memory that is free."""
Ordered = tuple[dict[str, Any], Trial]
"""The order, and what its trials have in common."""


def spare_mib(free_bytes: int) -> int:
    """Memory that a measuring child may fill."""
    return min(MOST_MIB, max(LEAST_MIB, free_bytes // SPARE_SHARE // MIB))


def bandwidth(subject: Subject, *, budget_s: float) -> Iterator[Ordered]:
    """Reading memory with different numbers of threads, one order for each set of CPUs."""
    for cpus, threads in _by_cpus(subject.host):
        yield ({"gauge": "bandwidth", "threads": threads, "mib": spare_mib(subject.free_bytes), "budget_s": budget_s,
                "cpus": cpus}, Trial(kind=BANDWIDTH, settings=_cpus(cpus), figures={}))


def threads(subject: Subject, *, budget_s: float, prompts: bool = True) -> Iterator[Ordered]:
    """All linears of the model with different threads, for one row and for a prompt."""
    for cpus, counts in _by_cpus(subject.host):
        yield from _weights(subject, subject.kernel, cpus, threads=counts, rows=(1, PREFILL_ROWS) if prompts else (1,),
                            budget_s=budget_s)


def variants(subject: Subject, *, full: bool, budget_s: float) -> Iterator[Ordered]:
    """The native kernel's instruction sets, each in a child of its own: one that dies is an answer about itself."""
    chosen = choose_threads(subject.host.topology, Settings())
    for variant in subject.variants:
        yield from _weights(subject, "native", list(chosen.cpus or ()), threads=[chosen.count], variant=variant,
                            rows=TABLE_ROWS if full else QUICK_ROWS, budget_s=budget_s)


def routes(subject: Subject, *, canary: bool, full: bool, budget_s: float) -> Iterator[Ordered]:
    """Other ways for many rows, beside the kernel's own: torch's GEMM by type, its int4 kernel where the canary passed.
    In a quick run only where the plan goes by it."""
    tier, native = subject.host.cpu.tier, subject.kernel == "native"
    gemms = GEMMS if tier in BF16_TIERS else GEMMS[1:]  # without the instructions bf16 is several times slower
    if not full and (tier != "amx" if native else len(gemms) == 1 and not canary):
        return
    chosen = choose_threads(subject.host.topology, Settings())
    together = ((OWN, *gemms), *(((INT4,),) if canary and not native else ()))  # the one that may die goes alone
    for routes in together:
        yield from _weights(subject, subject.kernel, list(chosen.cpus or ()), threads=[chosen.count], routes=routes,
                            budget_s=budget_s, rows=TABLE_ROWS if full else LIBRARY_ROWS if native else QUICK_ROWS)


def canary(subject: Subject, *, times: int = CANARY_TIMES) -> Ordered:
    """Several rows in torch's int4 kernel, attention and GEMM, again and again in one process."""
    settings = {"threads": choose_threads(subject.host.topology, Settings()).count, "times": times}
    return ({"gauge": "canary", "rows": list(CANARY_ROWS), "cpus": None, **settings},
            Trial(kind=CANARY, settings=settings, figures={}))


def _weights(subject: Subject, kernel: str, cpus: list[int] | None, *, threads: list[int], rows: tuple[int, ...],
             budget_s: float, variant: str = "", routes: tuple[str, ...] = (OWN,)) -> Iterator[Ordered]:
    """An order for the model's linears; none for a model whose shapes are not those of plain layers and which has no
    prepared weights to be mapped."""
    mapped = kernel == "native" and subject.prepared is not None
    if not mapped and (subject.model.experts or subject.model.kept):
        return
    yield ({"gauge": "weights", "threads": threads, "rows": list(rows), "kernel": kernel, "variants": [variant],
            "routes": list(routes), "prepared": str(subject.prepared) if mapped else "", "cpus": cpus or None,
            "mib": spare_mib(subject.free_bytes), "budget_s": budget_s,
            "layers": [] if mapped else list(_layers(subject.model))},
           Trial(kind=WEIGHTS, model=subject.model.digest, settings=_cpus(cpus), figures={}))


def _layers(model: ModelFacts) -> Iterator[Mapping[str, Any]]:
    """The linears of plain decoder layers as the worker fuses them."""
    attention, cache = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = ((attention + 2 * cache, model.hidden_size), (model.hidden_size, attention),
              (2 * model.intermediate_size, model.hidden_size), (model.hidden_size, model.intermediate_size))
    for n, k in shapes:
        yield {"n": n, "k": k, "group": model.group_size, "bits": 4, "count": model.layers, "head": False}
    bits = parse_config(model.quantization).stored_table_bits
    if bits == 4:
        yield {"n": model.vocab_size // 16 * 16, "k": model.hidden_size, "group": model.group_size, "bits": bits,
               "count": 1, "head": True}


def _by_cpus(host: HostFacts) -> Iterator[tuple[list[int] | None, list[int]]]:
    """The candidates' thread counts, set of CPUs by set of CPUs: a thread stays where its pool was made."""
    groups: dict[tuple[int, ...] | None, list[int]] = {}
    for count, cpus in candidates(host.topology):
        groups.setdefault(cpus, []).append(count)
    for cpus, counts in groups.items():
        yield (list(cpus) if cpus else None), sorted(counts)


def _cpus(cpus: list[int] | None) -> dict[str, Any]:
    return {"cpus": ranges(tuple(cpus))} if cpus else {}
